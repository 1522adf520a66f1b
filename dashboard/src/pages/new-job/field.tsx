import { useId } from 'react';
import { Words } from '~/components/Words';
import { useForm } from './form';
import { Input } from './inputs';
import { type Control, labelOf, type Path, pointerOf, type Schema, valueAt } from './schema';

/** What the control of a part of the spec is told of it. */
export interface PartProps {
  name: string;
  path: Path;
  schema: Schema;
  required?: boolean;
}

/** A field with its label, its description, and what is wrong with it. */
export function Leaf({ name, path, schema, control, required }: PartProps & { control: Control }) {
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
          <Words text={schema.description} />
        </span>
      )}
      <Problem id={`${id}-problem`} text={problem} />
    </div>
  );
}

export function Required() {
  return (
    <span className="required" title="has no default">
      {' '}
      required
    </span>
  );
}

export function Problem({ id, text }: { id: string; text: string | undefined }) {
  if (text === undefined) return null;
  return (
    <span id={id} className="form-error">
      {text}
    </span>
  );
}
