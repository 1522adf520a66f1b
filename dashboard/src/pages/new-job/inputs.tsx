import { useEffect, useState } from 'react';
import {
  type Control,
  defaultText,
  isObject,
  type Json,
  type JsonObject,
  type Schema,
} from './schema';

interface InputProps {
  common: { id: string; 'aria-invalid': boolean; 'aria-describedby': string | undefined };
  control: Control;
  value: Json | undefined;
  schema: Schema;
  onChange: (value: Json | undefined) => void;
}

/** The control of one value, by its kind. `undefined` leaves it to the default. */
export function Input(props: InputProps) {
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
