import { memo, useState } from 'react';
import type { Schemas } from '~/api/client';
import { Card, Wide } from '~/components/Page';
import { words } from '~/components/StatusBadge';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatDuration, formatTime, secondsSince, viewerZone } from '~/format/times';
import { type Job, useEvents } from './useJob';

const MORE = 100;
const MOST = 1000;

const MATTERS = 'matters';
// What every run does many times over; on asking it is shown too.
const ROUTINE = new Set([
  'phase',
  'artifact',
  'artifact_written',
  'artifact_removed',
  'checkpoint_removed',
  'progressed',
]);

const TONES: Record<string, string> = {
  fp8_alarm: 'bad',
  parity_beyond: 'bad',
  diverged: 'bad',
  step_skipped: 'waiting',
  node_unreachable: 'bad',
  stalled: 'bad',
  checkpoint: 'good',
  status: 'active',
};

/** All that happened to the job, newest first, and its attempts. */
export default function TimelineTab({ job }: { job: Job }) {
  const [limit, setLimit] = useState(MORE);
  const [kind, setKind] = useState(MATTERS);
  const events = useEvents(job.id, kind === '' || kind === MATTERS ? [] : [kind], limit);
  const [kinds, setKinds] = useState<string[]>([]);
  const read = events.data?.items ?? [];
  const found = kind === MATTERS ? read.filter((event) => !ROUTINE.has(event.kind)) : read;
  const fresh = read.map((event) => event.kind).filter((each) => !kinds.includes(each));
  if (fresh.length > 0) setKinds([...new Set([...kinds, ...fresh])].sort());

  return (
    <>
      <Attempts job={job} />
      <Card
        title="Events"
        actions={
          <>
            <span className="hint">Times in {viewerZone()}</span>
            <select
              className="select small"
              aria-label="Kind of event"
              value={kind}
              onChange={(event) => setKind(event.target.value)}
            >
              <option value={MATTERS}>What matters</option>
              <option value="">All kinds</option>
              {kinds.map((each) => (
                <option key={each} value={each}>
                  {words(each)}
                </option>
              ))}
            </select>
          </>
        }
      >
        {events.isPending ? (
          <Loading label="Reading the events" />
        ) : events.isError && !events.data ? (
          <ErrorState error={events.error} onRetry={() => void events.refetch()} />
        ) : found.length === 0 ? (
          <EmptyState title="No such events" />
        ) : (
          <ol className="timeline">
            {found.map((event) => (
              <EventRow key={event.seq} event={event} />
            ))}
          </ol>
        )}
        {events.data?.next_before != null && limit < MOST && (
          <button
            type="button"
            className="button"
            onClick={() => setLimit(Math.min(MOST, limit + MORE))}
          >
            Show older events
          </button>
        )}
      </Card>
    </>
  );
}

/** Events do not change: one of the same number is the same. */
const EventRow = memo(
  function EventRow({ event }: { event: Schemas['EventObject'] }) {
    return (
      <li>
        <time dateTime={event.time}>{formatTime(event.time)}</time>
        <span className={`badge ${TONES[event.kind] ?? 'idle'}`}>{words(event.kind)}</span>
        <span className="timeline-text">
          {event.message}
          <span className="muted">
            {event.attempt === null ? '' : ` · attempt ${event.attempt}`} · {event.actor}
          </span>
        </span>
      </li>
    );
  },
  (one, other) => one.event.seq === other.event.seq,
);

function Attempts({ job }: { job: Job }) {
  if (job.attempts.length === 0) return null;
  return (
    <Card title="Attempts">
      <Wide label="Attempts of the job">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Number</th>
              <th scope="col">Node</th>
              <th scope="col">State</th>
              <th scope="col">Last step</th>
              <th scope="col">Waited</th>
              <th scope="col">Ran</th>
              <th scope="col">How it ended</th>
            </tr>
          </thead>
          <tbody>
            {job.attempts.map((attempt) => {
              const end = attempt.ended_at ? Date.parse(attempt.ended_at) : Date.now();
              const claimed = attempt.started_at ? Date.parse(attempt.started_at) : end;
              return (
                <tr key={attempt.id}>
                  <td>{attempt.number}</td>
                  <td>{attempt.node}</td>
                  <td>{attempt.outcome ?? attempt.phase ?? attempt.status}</td>
                  <td>{attempt.step ?? '–'}</td>
                  <td className="nowrap">
                    {formatDuration(secondsSince(attempt.created_at, claimed))}
                  </td>
                  <td className="nowrap">
                    {formatDuration(secondsSince(attempt.started_at, end))}
                  </td>
                  <td>
                    {attempt.reason
                      ? `${words(attempt.reason)}${attempt.detail ? `: ${attempt.detail}` : ''}`
                      : '–'}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Wide>
    </Card>
  );
}
