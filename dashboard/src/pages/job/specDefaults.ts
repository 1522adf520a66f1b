/** Which fields of a stored spec were written by a user, and which say what their default says. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  title?: string;
  description?: string;
  default?: Json;
  const?: Json;
  enum?: Json[];
  type?: string;
  properties?: Record<string, Schema>;
  anyOf?: Schema[];
  oneOf?: Schema[];
  discriminator?: { propertyName: string; mapping?: Record<string, string> };
}

export interface Field {
  /** Names from the root, such as `['training', 'optimizer', 'lr']`. */
  path: string[];
  value: Json;
  /** Whether the value is the one that the field has when nothing is said. */
  isDefault: boolean;
  /** Whether the value says which kind of part this is: nothing else can stand there. */
  isKind: boolean;
  description: string;
}

const isObject = (value: unknown): value is { [name: string]: Json } =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** Whether two JSON values are the same, whatever the order of names. */
export function same(one: Json | undefined, other: Json | undefined): boolean {
  if (one === other) return true;
  if (Array.isArray(one) && Array.isArray(other)) {
    return one.length === other.length && one.every((value, index) => same(value, other[index]));
  }
  if (isObject(one) && isObject(other)) {
    const names = Object.keys(one);
    return (
      names.length === Object.keys(other).length &&
      names.every((name) => same(one[name], other[name]))
    );
  }
  return false;
}

/** The schema of this very value: references followed, the member of a union chosen. */
function resolve(schema: Schema, value: Json, root: Schema): Schema {
  let current = schema;
  for (let depth = 0; depth < 12; depth += 1) {
    if (current.$ref) {
      const found = root.$defs?.[current.$ref.replace('#/$defs/', '')];
      if (!found) return current;
      current = found;
      continue;
    }
    const members = current.oneOf ?? current.anyOf;
    if (!members) return current;
    const { discriminator } = current;
    if (discriminator && isObject(value)) {
      const tag = value[discriminator.propertyName];
      const target = discriminator.mapping?.[String(tag)];
      if (!target) return current;
      current = { $ref: target };
      continue;
    }
    const fitting = members.find((member) => fits(resolve(member, value, root), value));
    if (!fitting) return current;
    current = fitting;
  }
  return current;
}

function fits(schema: Schema, value: Json): boolean {
  if (schema.type === 'null') return value === null;
  if (schema.type === 'object' || schema.properties) return isObject(value);
  if (schema.type === 'array') return Array.isArray(value);
  if (schema.type === 'string') return typeof value === 'string';
  if (schema.type === 'boolean') return typeof value === 'boolean';
  if (schema.type === 'number' || schema.type === 'integer') return typeof value === 'number';
  return true;
}

/** Every leaf of the spec, in its own order. */
export function fieldsOf(spec: { [name: string]: Json }, root: object): Field[] {
  const fields: Field[] = [];
  const schema = root as Schema;
  walk(spec, schema, schema, [], fields);
  return fields;
}

function walk(
  value: Json,
  schema: Schema | undefined,
  root: Schema,
  path: string[],
  fields: Field[],
): void {
  const exact = schema ? resolve(schema, value, root) : undefined;
  if (isObject(value) && exact?.properties) {
    for (const [name, member] of Object.entries(value)) {
      walk(member, exact.properties[name], root, [...path, name], fields);
    }
    return;
  }
  const fallback = schema?.default !== undefined ? schema.default : exact?.default;
  // Without a default of its own, what is empty says nothing.
  const empty = isObject(value) && Object.keys(value).length === 0;
  fields.push({
    path,
    value,
    isDefault: fallback === undefined ? empty : same(value, fallback),
    isKind: schema?.const !== undefined,
    description: schema?.description ?? exact?.description ?? '',
  });
}

/** Where a value comes from: `set` by a user, or filled in by the service in one of three ways. */
export type Origin = 'set' | 'recipe' | 'service' | 'default';

/**
 * Where each field's value comes from, by what was written of the spec; of jobs that do not tell
 * that (`given` null), what is other than the default counts as set.
 */
export function originOf(field: Field, given: { [name: string]: Json } | null): Origin {
  const { path, isDefault, isKind } = field;
  if (given === null) return isDefault ? 'default' : 'set';
  if (isWritten(path, given)) return 'set';
  const recipe = given.recipe;
  const named = isObject(recipe) && 'name' in recipe;
  if (!isDefault && named && RECIPE_PARTS.has(path[0] ?? '')) return 'recipe';
  return isDefault || isKind ? 'default' : 'service';
}

// What a stored recipe can hold: of `training` the precision alone.
const RECIPE_PARTS = new Set(['recipe', 'conversion', 'training']);

function isWritten(path: readonly string[], given: Json): boolean {
  let place: Json = given;
  for (const name of path) {
    if (!isObject(place)) return false;
    const next: Json | undefined = place[name];
    if (next === undefined) return false;
    place = next;
  }
  return true;
}

/** The spec with these fields alone. */
export function specOf(fields: readonly Field[]): { [name: string]: Json } {
  const spec: { [name: string]: Json } = {};
  for (const { path, value } of fields) {
    let place = spec;
    path.forEach((name, index) => {
      if (index === path.length - 1) place[name] = value;
      else {
        const next = place[name];
        const inner = isObject(next) ? next : {};
        place[name] = inner;
        place = inner;
      }
    });
  }
  return spec;
}

/** What makes this very spec when it is sent again: what was set, and what is no default. */
export function copyOf(
  fields: readonly Field[],
  given: { [name: string]: Json } | null,
): { [name: string]: Json } {
  return specOf(fields.filter((field) => !field.isDefault || originOf(field, given) === 'set'));
}

// Parts that are of one kind or another, and what says which. The service begins such a part anew
// when its kind changes, as the fields of one kind may be unknown to another.
const KINDS: Record<string, readonly string[]> = {
  model: ['source'],
  tokenizer: ['source'],
  data: ['source'],
  recipe: ['engine', 'scaling'],
  'training.optimizer': ['name'],
  'training.schedule': ['name'],
};

/**
 * A JSON merge patch (RFC 7396) that makes the spec `from` into `to`. A part of another kind is in
 * it whole.
 */
export function mergePatch(
  from: { [name: string]: Json },
  to: { [name: string]: Json },
  place: readonly string[] = [],
): { [name: string]: Json } {
  const patch: { [name: string]: Json } = {};
  for (const name of Object.keys(from)) if (!(name in to)) patch[name] = null;
  for (const [name, value] of Object.entries(to)) {
    const old = from[name];
    if (same(old, value)) continue;
    if (!isObject(old) || !isObject(value)) {
      patch[name] = value;
      continue;
    }
    const inner = [...place, name];
    const kinds = KINDS[inner.join('.')] ?? [];
    const changes = mergePatch(old, value, inner);
    patch[name] = kinds.every((kind) => same(old[kind], value[kind]))
      ? changes
      : { ...changes, ...value };
  }
  return patch;
}
