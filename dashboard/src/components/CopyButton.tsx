import { toast } from './Toast';

/** Puts a text into the clipboard. */
export function CopyButton({
  text,
  label = 'Copy',
}: {
  text: string | (() => string);
  label?: string;
}) {
  async function copy() {
    try {
      await navigator.clipboard.writeText(typeof text === 'string' ? text : text());
      toast('Copied');
    } catch {
      toast('The browser does not allow copying here: select the text and copy it by hand.', 'bad');
    }
  }
  return (
    <button type="button" className="button small" onClick={() => void copy()}>
      {label}
    </button>
  );
}
