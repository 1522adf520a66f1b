import { useEffect, useId, useState } from 'react';
import { isObject, type JsonObject } from './schema';

/** The whole spec as text; taken over into the form whenever it is a JSON object. */
export function JsonEditor({
  spec,
  onChange,
}: {
  spec: JsonObject;
  onChange: (spec: JsonObject) => void;
}) {
  const id = useId();
  const shown = JSON.stringify(spec, null, 2);
  const [text, setText] = useState(shown);
  const [wrong, setWrong] = useState('');
  useEffect(() => {
    // What was changed elsewhere replaces the text; what was typed here stays as it was typed.
    setText((before) => (normal(before) === JSON.stringify(spec) ? before : shown));
    setWrong('');
  }, [spec, shown]);
  function type(next: string) {
    setText(next);
    try {
      const value: unknown = JSON.parse(next);
      if (!isObject(value)) throw new Error('a spec is an object: { ... }');
      setWrong('');
      onChange(value);
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
  }
  return (
    <div className="json-editor">
      <label className="visually-hidden" htmlFor={id}>
        The spec as JSON
      </label>
      <textarea
        id={id}
        className="textarea"
        rows={Math.min(60, Math.max(24, text.split('\n').length + 1))}
        spellCheck={false}
        value={text}
        aria-invalid={wrong !== ''}
        aria-describedby={wrong ? `${id}-problem` : undefined}
        onChange={(event) => type(event.target.value)}
      />
      {wrong ? (
        <p id={`${id}-problem`} className="form-error">
          Not taken over yet: {wrong}
        </p>
      ) : (
        <p className="hint">
          Form and JSON are the same spec: what is changed in one is changed in the other.
        </p>
      )}
    </div>
  );
}

function normal(text: string): string | undefined {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return undefined;
  }
}
