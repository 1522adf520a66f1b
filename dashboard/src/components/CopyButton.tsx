import { useState } from 'react';
import { Dialog } from './Dialog';
import { toast } from './Toast';

/** Puts a text into the clipboard; where browsers give none, over plain HTTP, it shows the text. */
export function CopyButton({
  text,
  label = 'Copy',
}: {
  text: string | (() => string);
  label?: string;
}) {
  const [shown, setShown] = useState<string | null>(null);
  async function copy() {
    const copied = typeof text === 'string' ? text : text();
    try {
      await navigator.clipboard.writeText(copied);
      toast('Copied');
    } catch {
      setShown(copied);
    }
  }
  return (
    <>
      <button type="button" className="button small" onClick={() => void copy()}>
        {label}
      </button>
      {shown !== null && (
        <Dialog
          wide
          title={label}
          onClose={() => setShown(null)}
          actions={
            <button type="button" className="button" onClick={() => setShown(null)}>
              Close
            </button>
          }
        >
          <label className="field">
            <span className="field-label">
              The browser gives this page no clipboard: copy the text by hand.
            </span>
            <textarea
              className="textarea code-edit"
              readOnly
              value={shown}
              onFocus={(event) => event.target.select()}
            />
          </label>
        </Dialog>
      )}
    </>
  );
}
