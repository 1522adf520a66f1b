import { useSyncExternalStore } from 'react';

/** How the service was met with last: it answered, nobody did, or it said that it cannot. */
export type Reach = 'answers' | 'away' | 'failing';

// What says that the service, or a part of it that it needs, is not there: no single request's fault.
const FAILING = new Set([502, 503, 504]);

let reach: Reach = 'answers';
const listeners = new Set<() => void>();

/** Told of each request: the status of its answer, 0 where there was none. */
export function heardOf(status: number): void {
  const next = status === 0 ? 'away' : FAILING.has(status) ? 'failing' : 'answers';
  if (next === reach) return;
  reach = next;
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** How the service was met with last, by whichever part of the page asked it. */
export function useReach(): Reach {
  return useSyncExternalStore(subscribe, () => reach);
}
