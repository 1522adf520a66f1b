/** A job's spec as its JSON schema describes it: what kind of control each part needs. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type JsonObject = { [name: string]: Json };
export type Path = readonly (string | number)[];

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  title?: string;
  description?: string;
  type?: string;
  const?: Json;
  enum?: Json[];
  default?: Json;
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: boolean | Schema;
  patternProperties?: Record<string, Schema>;
  items?: Schema;
  prefixItems?: Schema[];
  anyOf?: Schema[];
  oneOf?: Schema[];
  discriminator?: { propertyName: string; mapping: Record<string, string> };
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  maxLength?: number;
}

/** One way to fill a union, by the value of its discriminator. */
export interface Branch {
  value: string;
  schema: Schema;
}

export type Control =
  | { kind: 'object'; schema: Schema }
  | { kind: 'union'; property: string; branches: Branch[]; schema: Schema }
  | { kind: 'enum'; values: Json[] }
  | { kind: 'boolean' }
  | { kind: 'number'; integer: boolean; schema: Schema }
  | { kind: 'text'; schema: Schema }
  | { kind: 'list'; items: Schema }
  | { kind: 'flags'; labels: string[] }
  | { kind: 'map' }
  | { kind: 'json' };

/** The schema that a reference stands for, with what is said beside the reference. */
export function resolve(schema: Schema, root: Schema): Schema {
  let found = schema;
  for (let depth = 0; found.$ref !== undefined && depth < 10; depth += 1) {
    const { $ref, ...beside } = found;
    const target = root.$defs?.[$ref.replace('#/$defs/', '')];
    if (target === undefined) throw new Error(`The schema has no part ${$ref}.`);
    found = { ...target, ...beside };
  }
  return found;
}

/** A schema without its null, and whether it had one. */
export function withoutNull(schema: Schema, root: Schema): [Schema, boolean] {
  const options = schema.anyOf?.filter((option) => option.type !== 'null');
  if (schema.anyOf === undefined || options === undefined) return [schema, false];
  const nullable = options.length < schema.anyOf.length;
  const only = options[0];
  if (options.length !== 1 || only === undefined) return [schema, nullable];
  const { anyOf: _, ...beside } = schema;
  return [{ ...resolve(only, root), ...beside }, nullable];
}

const FLAGS: Record<string, string[]> = { override_linear_precision: ['fprop', 'dgrad', 'wgrad'] };

/** The control for a part of the spec of this name. */
export function controlOf(name: string, given: Schema, root: Schema): Control {
  const schema = resolve(given, root);
  if (schema.discriminator && schema.oneOf) {
    const mapping = Object.entries(schema.discriminator.mapping);
    const branches = mapping.map(([value, $ref]) => ({ value, schema: resolve({ $ref }, root) }));
    return { kind: 'union', property: schema.discriminator.propertyName, branches, schema };
  }
  if (schema.enum) return { kind: 'enum', values: schema.enum };
  if (schema.const !== undefined) return { kind: 'enum', values: [schema.const] };
  switch (schema.type) {
    case 'boolean':
      return { kind: 'boolean' };
    case 'integer':
    case 'number':
      return { kind: 'number', integer: schema.type === 'integer', schema };
    case 'string':
      return { kind: 'text', schema };
    case 'array': {
      const labels = FLAGS[name];
      if (labels && schema.prefixItems) return { kind: 'flags', labels };
      const items = schema.items && resolve(schema.items, root);
      return items?.type === 'string' ? { kind: 'list', items } : { kind: 'json' };
    }
    case 'object':
      // Of an object that takes any member its properties are but the beginning.
      if (schema.properties && !schema.additionalProperties) return { kind: 'object', schema };
      return schema.patternProperties ? { kind: 'map' } : { kind: 'json' };
    default:
      return { kind: 'json' };
  }
}

/** The branch of a union that a value is in; the schema's default, or the first, without one. */
export function branchOf(
  control: Control & { kind: 'union' },
  value: Json | undefined,
): Branch | undefined {
  const named = isObject(value) ? value[control.property] : undefined;
  const fallback = control.branches.find(
    ({ schema }) => schema.properties?.[control.property]?.default !== undefined,
  );
  if (named === undefined)
    return fallback ?? (value === undefined ? undefined : control.branches[0]);
  return control.branches.find((branch) => branch.value === named);
}

export function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** What stands at this place of the spec. */
export function valueAt(value: Json | undefined, path: Path): Json | undefined {
  let found: Json | undefined = value;
  for (const step of path) {
    if (Array.isArray(found) && typeof step === 'number') found = found[step];
    else if (isObject(found)) found = found[String(step)];
    else return undefined;
  }
  return found;
}

/** The object with this value at the place; `undefined` takes it away, with what is empty then. */
export function withValue(spec: JsonObject, path: Path, value: Json | undefined): JsonObject {
  const [first, ...rest] = path;
  if (first === undefined) return isObject(value) ? value : {};
  const name = String(first);
  const { [name]: inner, ...others } = spec;
  if (rest.length === 0) {
    if (value === undefined) return others;
    return name in spec ? { ...spec, [name]: value } : { ...others, [name]: value };
  }
  const changed = withValue(isObject(inner) ? inner : {}, rest, value);
  if (value === undefined && Object.keys(changed).length === 0) return others;
  return { ...spec, [name]: changed };
}

/** RFC 6901: the pointer of a place, as problems name it. */
export function pointerOf(path: Path): string {
  return path
    .map((step) => `/${String(step).replaceAll('~', '~0').replaceAll('/', '~1')}`)
    .join('');
}

/** The spec with a preset's parts in the place of its own: what the preset names is replaced. */
export function withFragment(spec: JsonObject, fragment: JsonObject): JsonObject {
  const { recipe, ...others } = fragment;
  let found: JsonObject = { ...spec };
  for (const part of ['recipe', 'conversion', 'adapter']) delete found[part];
  found = withValue(found, ['training', 'precision'], undefined);
  if (recipe !== undefined) found = { ...found, recipe };
  return merged(found, others);
}

function merged(base: JsonObject, over: JsonObject): JsonObject {
  const result = { ...base };
  for (const [name, value] of Object.entries(over)) {
    const before = result[name];
    result[name] = isObject(before) && isObject(value) ? merged(before, value) : value;
  }
  return result;
}

/** What of a full spec differs from the schema's defaults: what somebody must have set. */
export function withoutDefaults(value: JsonObject, given: Schema, root: Schema): JsonObject {
  const schema = resolve(given, root);
  const required = new Set(schema.required ?? []);
  const result: JsonObject = {};
  for (const [name, inner] of Object.entries(value)) {
    const property = schema.properties?.[name];
    if (property === undefined) {
      result[name] = inner;
      continue;
    }
    const [plain] = withoutNull(resolve(property, root), root);
    const control = controlOf(name, plain, root);
    let kept: Json = inner;
    if (isObject(inner) && control.kind === 'union')
      kept = unionWithoutDefaults(inner, control, root);
    else if (isObject(inner) && control.kind === 'object')
      kept = withoutDefaults(inner, plain, root);
    const empty = isObject(kept) && Object.keys(kept).length === 0;
    const isDefault =
      (property.default !== undefined && same(inner, property.default)) ||
      (Array.isArray(inner) && inner.length === 0);
    if (required.has(name) || (!empty && !isDefault)) result[name] = kept;
  }
  return result;
}

function unionWithoutDefaults(
  value: JsonObject,
  union: Control & { kind: 'union' },
  root: Schema,
): Json {
  const branch = branchOf(union, value);
  if (branch === undefined) return value;
  const inner = controlOf('', branch.schema, root);
  if (inner.kind === 'union') {
    const kept = unionWithoutDefaults(value, inner, root);
    return isObject(kept) ? { [union.property]: branch.value, ...kept } : kept;
  }
  return { [union.property]: branch.value, ...withoutDefaults(value, branch.schema, root) };
}

function same(left: Json, right: Json): boolean {
  return JSON.stringify(left) === JSON.stringify(right);
}

/** `max_grad_norm` as “Max grad norm”, unless the schema has a title of its own. */
export function labelOf(name: string, schema: Schema): string {
  const title = schema.title;
  if (title && !/^(Spec)?[A-Z][a-z]+[A-Z]/.test(title) && !title.startsWith('Spec')) return title;
  const text = name.replaceAll('_', ' ');
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** What a default reads like in an empty control. */
export function defaultText(value: Json | undefined): string {
  if (value === undefined) return '';
  if (value === null) return 'none';
  return typeof value === 'string' ? value : JSON.stringify(value);
}
