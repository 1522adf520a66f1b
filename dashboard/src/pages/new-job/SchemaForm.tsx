import { createContext, type ReactNode, useContext, useEffect, useId, useState } from 'react';
import {
  type Branch,
  branchOf,
  type Control,
  controlOf,
  defaultText,
  isObject,
  type Json,
  type JsonObject,
  labelOf,
  type Path,
  pointerOf,
  resolve,
  type Schema,
  valueAt,
  withoutNull,
} from './schema';

/** What all fields of one form share. */
interface Form {
  root: Schema;
  spec: JsonObject;
  /** Sets the value at a place; `undefined` leaves it to the default. */
  change: (path: Path, value: Json | undefined) => void;
  /** What the service says of a place, by JSON pointer. */
  problems: ReadonlyMap<string, string>;
}

const FormContext = createContext<Form | null>(null);

function useForm(): Form {
  const form = useContext(FormContext);
  if (form === null) throw new Error('a field stands outside of its form');
  return form;
}

export function SchemaForm(props: Form & { children: ReactNode }) {
  const { children, ...form } = props;
  return <FormContext.Provider value={form}>{children}</FormContext.Provider>;
}

interface PartProps {
  name: string;
  path: Path;
  schema: Schema;
  required?: boolean;
}

/** The control of one part of the spec, and of all below it. */
export function SchemaField({ name, path, schema: given, required = false }: PartProps) {
  const { root } = useForm();
  const whole = resolve(given, root);
  const [schema, nullable] = withoutNull(whole, root);
  const control = controlOf(name, schema, root);
  if (control.kind === 'object' && nullable) {
    return <OptionalGroup name={name} path={path} schema={schema} whole={whole} />;
  }
  if (control.kind === 'object' || control.kind === 'union') {
    return (
      <Group name={name} path={path} schema={whole}>
        <Parts name={name} path={path} control={control} required={required} />
      </Group>
    );
  }
  return (
    <Leaf
      name={name}
      path={path}
      schema={{ ...schema, default: whole.default ?? schema.default }}
      control={control}
      required={required}
    />
  );
}

/** The parts of an object, or of the chosen branch of a union, without a heading of their own. */
export function Parts(props: {
  name: string;
  path: Path;
  control: Control;
  required?: boolean;
  hide?: string[];
}) {
  const { root, spec, change } = useForm();
  const { control, path, name } = props;
  const value = valueAt(spec, path);
  if (typeof value === 'string') {
    return (
      <div className="shorthand">
        <span>
          The shorthand <code>{value}</code> sets all of this.
        </span>
        <button type="button" className="button small" onClick={() => change(path, undefined)}>
          Set the fields one by one
        </button>
      </div>
    );
  }
  if (control.kind === 'object') {
    const required = new Set(control.schema.required ?? []);
    const hidden = new Set(props.hide ?? []);
    return (
      <div className="parts">
        {Object.entries(control.schema.properties ?? {})
          .filter(([inner]) => !hidden.has(inner))
          .map(([inner, schema]) => (
            <SchemaField
              key={inner}
              name={inner}
              path={[...path, inner]}
              schema={schema}
              required={required.has(inner)}
            />
          ))}
      </div>
    );
  }
  if (control.kind !== 'union') return null;
  const branch = branchOf(control, value);
  const inner = branch && controlOf(name, branch.schema, root);
  const label = labelOf(control.property, {});
  return (
    <>
      <div className="parts">
        <UnionChoice
          label={label}
          path={path}
          control={control}
          branch={branch}
          required={props.required ?? false}
        />
      </div>
      {branch?.schema.description && <p className="hint">{branch.schema.description}</p>}
      {inner && (
        <Parts
          key={branch.value}
          name={name}
          path={path}
          control={inner}
          hide={[...(props.hide ?? []), control.property]}
        />
      )}
    </>
  );
}

function UnionChoice(props: {
  label: string;
  path: Path;
  control: Control & { kind: 'union' };
  branch: Branch | undefined;
  required: boolean;
}) {
  const { spec, change, problems } = useForm();
  const id = useId();
  const { control, path } = props;
  const value = valueAt(spec, path);
  const named = isObject(value) ? value[control.property] : undefined;
  const problem =
    problems.get(pointerOf(path)) ?? problems.get(pointerOf([...path, control.property]));
  function choose(next: string) {
    if (next === '') {
      change(path, undefined);
      return;
    }
    // What the branches share is kept; what only the former one had would be refused.
    const branch = control.branches.find((one) => one.value === next);
    const known = new Set(Object.keys(branch?.schema.properties ?? {}));
    const kept = isObject(value) ? Object.entries(value).filter(([key]) => known.has(key)) : [];
    change(path, { ...Object.fromEntries(kept), [control.property]: next });
  }
  return (
    <div className="spec-field">
      <label className="field-label" htmlFor={id}>
        {props.label}
        {props.required && <Required />}
      </label>
      <select
        id={id}
        className="select"
        value={typeof named === 'string' ? named : ''}
        aria-invalid={problem !== undefined}
        aria-describedby={problem ? `${id}-problem` : undefined}
        onChange={(event) => choose(event.target.value)}
      >
        <option value="">{props.branch ? `${props.branch.value} (default)` : 'choose…'}</option>
        {control.branches.map((branch) => (
          <option key={branch.value} value={branch.value}>
            {branch.value}
          </option>
        ))}
      </select>
      <Problem id={`${id}-problem`} text={problem} />
    </div>
  );
}

function Group({ name, path, schema, children }: PartProps & { children: ReactNode }) {
  const { spec, problems } = useForm();
  const value = valueAt(spec, path);
  const count = isObject(value) ? Object.keys(value).length : value === undefined ? 0 : 1;
  const pointer = pointerOf(path);
  const wrong = [...problems.keys()].some(
    (key) => key === pointer || key.startsWith(`${pointer}/`),
  );
  const [open, setOpen] = useState(count > 0);
  useEffect(() => {
    if (wrong) setOpen(true);
  }, [wrong]);
  return (
    <details
      className="spec-group"
      open={open}
      onToggle={(event) => setOpen(event.currentTarget.open)}
    >
      <summary>
        <span className="field-label">{labelOf(name, schema)}</span>
        <span className="hint">{count === 0 ? 'defaults' : `${count} set`}</span>
      </summary>
      {schema.description && <p className="hint">{schema.description}</p>}
      {children}
    </details>
  );
}

/** A group that is null by default: a switch turns it on. */
function OptionalGroup({ name, path, schema, whole }: PartProps & { whole: Schema }) {
  const { root, spec, change } = useForm();
  const value = valueAt(spec, path);
  const on = isObject(value);
  return (
    <fieldset className="spec-group">
      <label className="check">
        <input
          type="checkbox"
          checked={on}
          onChange={(event) => change(path, event.target.checked ? {} : undefined)}
        />
        <span className="field-label">{labelOf(name, whole)}</span>
      </label>
      {whole.description && <p className="hint">{whole.description}</p>}
      {on && <Parts name={name} path={path} control={controlOf(name, schema, root)} />}
    </fieldset>
  );
}

function Required() {
  return (
    <span className="required" title="has no default">
      {' '}
      required
    </span>
  );
}

function Problem({ id, text }: { id: string; text: string | undefined }) {
  if (text === undefined) return null;
  return (
    <span id={id} className="form-error">
      {text}
    </span>
  );
}

function Leaf({ name, path, schema, control, required }: PartProps & { control: Control }) {
  const { spec, change, problems } = useForm();
  const id = useId();
  const value = valueAt(spec, path);
  const pointer = pointerOf(path);
  const problem =
    problems.get(pointer) ?? [...problems].find(([key]) => key.startsWith(`${pointer}/`))?.[1];
  const isSet = value !== undefined;
  const described = [schema.description ? `${id}-hint` : '', problem ? `${id}-problem` : '']
    .filter(Boolean)
    .join(' ');
  const common = {
    id,
    'aria-invalid': problem !== undefined,
    'aria-describedby': described || undefined,
  };
  const wide = control.kind === 'json' || control.kind === 'map' || control.kind === 'list';
  return (
    <div className={`spec-field${isSet ? ' set' : ''}${wide ? ' wide' : ''}`}>
      <div className="spec-label">
        <label className="field-label" htmlFor={id}>
          {labelOf(name, schema)}
          {required && <Required />}
        </label>
        {isSet && !required && (
          <button
            type="button"
            className="button quiet small"
            aria-label={`${labelOf(name, schema)}: back to the default`}
            onClick={() => change(path, undefined)}
          >
            default
          </button>
        )}
      </div>
      <Input
        common={common}
        control={control}
        value={value}
        schema={schema}
        onChange={(next) => change(path, next)}
      />
      {schema.description && (
        <span id={`${id}-hint`} className="hint">
          {schema.description}
        </span>
      )}
      <Problem id={`${id}-problem`} text={problem} />
    </div>
  );
}

interface InputProps {
  common: { id: string; 'aria-invalid': boolean; 'aria-describedby': string | undefined };
  control: Control;
  value: Json | undefined;
  schema: Schema;
  onChange: (value: Json | undefined) => void;
}

function Input(props: InputProps) {
  const { common, control, value, schema, onChange } = props;
  const fallback = defaultText(schema.default);
  switch (control.kind) {
    case 'enum':
      return (
        <select
          {...common}
          className="select"
          value={value === undefined ? '' : JSON.stringify(value)}
          onChange={(event) =>
            onChange(
              event.target.value === '' ? undefined : (JSON.parse(event.target.value) as Json),
            )
          }
        >
          <option value="">{fallback ? `${fallback} (default)` : 'default'}</option>
          {control.values.map((one) => (
            <option key={JSON.stringify(one)} value={JSON.stringify(one)}>
              {defaultText(one)}
            </option>
          ))}
        </select>
      );
    case 'boolean':
      return (
        <select
          {...common}
          className="select"
          value={value === undefined ? '' : String(value)}
          onChange={(event) =>
            onChange(event.target.value === '' ? undefined : event.target.value === 'true')
          }
        >
          <option value="">{schema.default === true ? 'yes (default)' : 'no (default)'}</option>
          <option value="true">yes</option>
          <option value="false">no</option>
        </select>
      );
    case 'number':
      return <NumberInput {...props} fallback={fallback} />;
    case 'text':
      return (
        <input
          {...common}
          className="input"
          value={typeof value === 'string' ? value : ''}
          placeholder={fallback}
          maxLength={control.schema.maxLength}
          onChange={(event) => onChange(event.target.value === '' ? undefined : event.target.value)}
        />
      );
    case 'list':
      return <ListInput {...props} />;
    case 'flags':
      return (
        <span id={common.id} className="flags">
          {control.labels.map((label, index) => {
            const flags = Array.isArray(value) ? value : control.labels.map(() => false);
            return (
              <label key={label} className="check">
                <input
                  type="checkbox"
                  checked={flags[index] === true}
                  onChange={(event) =>
                    onChange(flags.map((flag, at) => (at === index ? event.target.checked : flag)))
                  }
                />
                {label}
              </label>
            );
          })}
        </span>
      );
    case 'map':
      return <MapInput {...props} />;
    default:
      return <JsonInput {...props} />;
  }
}

/** Keeps what is typed, also while it is no number yet; the service judges what is one. */
function NumberInput({
  common,
  control,
  value,
  fallback,
  onChange,
}: InputProps & { fallback: string }) {
  const shown = value === undefined ? '' : String(value);
  const [text, setText] = useState(shown);
  useEffect(() => {
    setText((before) =>
      value !== undefined && Number(before) === value && before !== '' ? before : shown,
    );
  }, [shown, value]);
  const integer = control.kind === 'number' && control.integer;
  function type(next: string) {
    setText(next);
    const trimmed = next.trim();
    if (trimmed === '') onChange(undefined);
    else onChange(Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed);
  }
  return (
    <input
      {...common}
      className="input"
      inputMode={integer ? 'numeric' : 'decimal'}
      value={text}
      placeholder={fallback}
      onChange={(event) => type(event.target.value)}
    />
  );
}

/** Texts, one a line. */
function ListInput({ common, value, onChange }: InputProps) {
  const shown = Array.isArray(value) ? value.join('\n') : '';
  const [text, setText] = useState(shown);
  useEffect(() => {
    setText((before) => (lines(before).join('\n') === shown ? before : shown));
  }, [shown]);
  return (
    <textarea
      {...common}
      className="textarea short"
      rows={2}
      placeholder="one a line"
      value={text}
      onChange={(event) => {
        setText(event.target.value);
        const found = lines(event.target.value);
        onChange(found.length > 0 ? found : undefined);
      }}
    />
  );
}

function lines(text: string): string[] {
  return text
    .split('\n')
    .map((line) => line.trim())
    .filter((line) => line !== '');
}

/** Names and values, `name=value`, one a line. */
function MapInput({ common, value, onChange }: InputProps) {
  const shown = isObject(value)
    ? Object.entries(value)
        .map(([name, inner]) => `${name}=${String(inner)}`)
        .join('\n')
    : '';
  const [text, setText] = useState(shown);
  useEffect(() => {
    setText((before) =>
      JSON.stringify(pairs(before)) === JSON.stringify(pairs(shown)) ? before : shown,
    );
  }, [shown]);
  return (
    <textarea
      {...common}
      className="textarea short"
      rows={2}
      placeholder="name=value, one a line"
      value={text}
      onChange={(event) => {
        setText(event.target.value);
        const found = pairs(event.target.value);
        onChange(Object.keys(found).length > 0 ? found : undefined);
      }}
    />
  );
}

function pairs(text: string): JsonObject {
  return Object.fromEntries(
    lines(text).map((line) => {
      const at = line.indexOf('=');
      return at === -1 ? [line, ''] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    }),
  );
}

/** A part that has no schema: JSON, taken over whenever it can be read. */
function JsonInput({ common, value, onChange }: InputProps) {
  const shown = value === undefined ? '' : JSON.stringify(value, null, 2);
  const [text, setText] = useState(shown);
  const [wrong, setWrong] = useState('');
  useEffect(() => {
    setText((before) => (readJson(before) === JSON.stringify(value) ? before : shown));
  }, [shown, value]);
  return (
    <>
      <textarea
        {...common}
        className="textarea"
        rows={Math.min(14, Math.max(3, text.split('\n').length))}
        spellCheck={false}
        placeholder="JSON"
        value={text}
        onChange={(event) => {
          const next = event.target.value;
          setText(next);
          if (next.trim() === '') {
            setWrong('');
            onChange(undefined);
            return;
          }
          try {
            onChange(JSON.parse(next) as Json);
            setWrong('');
          } catch (error) {
            setWrong(error instanceof Error ? error.message : String(error));
          }
        }}
      />
      {wrong && <span className="form-error">Not JSON yet: {wrong}</span>}
    </>
  );
}

function readJson(text: string): string | undefined {
  if (text.trim() === '') return undefined;
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return undefined;
  }
}
