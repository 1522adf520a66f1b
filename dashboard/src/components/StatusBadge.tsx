import type { Schemas } from '~/api/client';

type Status = Schemas['Status'];

const TONES: Record<Status, string> = {
  draft: 'idle',
  queued: 'waiting',
  starting: 'active',
  running: 'active',
  pausing: 'waiting',
  paused: 'idle',
  cancelling: 'waiting',
  succeeded: 'good',
  failed: 'bad',
  cancelled: 'idle',
};

/** `out_of_memory` as “out of memory”. */
export function words(name: string): string {
  return name.replaceAll('_', ' ');
}

/** A job's status, and why it is so where the service tells. Colour is never the only sign. */
export function StatusBadge(props: {
  status: string;
  reason?: string | null;
  detail?: string | null;
}) {
  const tone = TONES[props.status as Status] ?? 'idle';
  const reason = props.reason && props.reason !== 'completed' ? words(props.reason) : null;
  return (
    <span className="status" title={props.detail ?? undefined}>
      <span className={`badge ${tone}`}>
        <span className="dot" aria-hidden="true" />
        {props.status}
      </span>
      {reason && <span className="reason">{reason}</span>}
    </span>
  );
}
