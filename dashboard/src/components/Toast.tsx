import { useSyncExternalStore } from 'react';
import { advice } from '~/api/problem';

interface Toast {
  id: number;
  tone: 'good' | 'bad';
  text: string;
}

let toasts: readonly Toast[] = [];
let last = 0;
const listeners = new Set<() => void>();

function change(next: readonly Toast[]): void {
  toasts = next;
  for (const listener of listeners) listener();
}

function dismiss(id: number): void {
  change(toasts.filter((toast) => toast.id !== id));
}

/** A short message at the corner; a bad one stays until it is closed. */
export function toast(text: string, tone: Toast['tone'] = 'good'): void {
  last += 1;
  const id = last;
  change([...toasts.slice(-3), { id, tone, text }]);
  if (tone === 'good') setTimeout(() => dismiss(id), 6000);
}

/** The message of a failure, with what can be done. */
export function toastError(error: unknown): void {
  toast(`${error instanceof Error ? error.message : String(error)} ${advice(error)}`, 'bad');
}

export function ToastArea() {
  const shown = useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => toasts,
  );
  return (
    <div className="toasts" role="status" aria-live="polite">
      {shown.map(({ id, tone, text }) => (
        <div key={id} className={`toast ${tone}`}>
          <span>{text}</span>
          <button
            type="button"
            className="button quiet small"
            aria-label="Close this message"
            onClick={() => dismiss(id)}
          >
            ×
          </button>
        </div>
      ))}
    </div>
  );
}
