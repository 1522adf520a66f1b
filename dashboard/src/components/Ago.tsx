import { useSyncExternalStore } from 'react';
import { formatAge, formatTime, secondsSince, viewerZone } from '~/format/times';

let now = Date.now();
const listeners = new Set<() => void>();
let timer: ReturnType<typeof setInterval> | undefined;

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= setInterval(() => {
    now = Date.now();
    for (const each of listeners) each();
  }, 10_000);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      clearInterval(timer);
      timer = undefined;
    }
  };
}

/** The present, looked at every ten seconds by one clock for all who show it. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => now);
}

/** How long ago; the moment itself, in the viewer's zone, on hovering. */
export function Ago({ time }: { time: string | null | undefined }) {
  const present = useNow();
  if (!time) return <span className="muted">–</span>;
  return (
    <time dateTime={time} title={`${formatTime(time)} (${viewerZone()})`}>
      {formatAge(secondsSince(time, Math.max(present, Date.parse(time))))}
    </time>
  );
}
