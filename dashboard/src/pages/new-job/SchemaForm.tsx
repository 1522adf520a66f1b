import { type ReactNode, useEffect, useId, useState } from 'react';
import { Words } from '~/components/Words';
import { Leaf, type PartProps, Problem, Required } from './field';
import { type Form, FormContext, useForm } from './form';
import {
  type Branch,
  branchOf,
  type Control,
  controlOf,
  isObject,
  labelOf,
  type Path,
  pointerOf,
  resolve,
  type Schema,
  valueAt,
  withoutNull,
} from './schema';

/** All fields within share this form. */
export function SchemaForm(props: Form & { children: ReactNode }) {
  const { children, ...form } = props;
  return <FormContext.Provider value={form}>{children}</FormContext.Provider>;
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
      {branch?.schema.description && (
        <p className="hint">
          <Words text={branch.schema.description} />
        </p>
      )}
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
      {schema.description && (
        <p className="hint">
          <Words text={schema.description} />
        </p>
      )}
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
      {whole.description && (
        <p className="hint">
          <Words text={whole.description} />
        </p>
      )}
      {on && <Parts name={name} path={path} control={controlOf(name, schema, root)} />}
    </fieldset>
  );
}
