import { useVirtualizer } from '@tanstack/react-virtual';
import { useCallback, useEffect, useRef, useState } from 'react';
import type { Schemas } from '~/api/client';
import { openStream } from '~/api/stream';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatClock, formatTime, viewerZone } from '~/format/times';
import { type LogFilter, logQuery, matches } from './logFilter';
import { type Job, jobPath, readJson } from './useJob';

type LogLine = Schemas['LogLine'];
type LogPage = Schemas['LogPage'];

const TAIL = 1000;
const KEPT = 20_000;
// Keys that lead away from the end.
const UPWARDS = new Set(['ArrowUp', 'PageUp', 'Home']);
const LEVELS = ['', 'debug', 'info', 'warning', 'error', 'critical'] as const;

/** The end of the log, live, with a filter; older lines are read on demand. */
export default function LogsTab({ job }: { job: Job }) {
  const [filter, setFilter] = useState<LogFilter>({ level: '', text: '', attempt: null });
  const [typed, setTyped] = useState('');
  useEffect(() => {
    const timer = setTimeout(
      () => setFilter((old) => (old.text === typed ? old : { ...old, text: typed })),
      300,
    );
    return () => clearTimeout(timer);
  }, [typed]);
  const download = `${jobPath(job.id)}/logs/download?timestamps=true&${logQuery(filter)}`;
  return (
    <section className="card" aria-label="Log">
      <div className="card-head">
        <div className="row">
          <input
            className="input small"
            type="search"
            aria-label="Search in the log"
            placeholder="Search in the log"
            value={typed}
            onChange={(event) => setTyped(event.target.value)}
          />
          <select
            className="select small"
            aria-label="Level"
            value={filter.level}
            onChange={(event) => setFilter({ ...filter, level: event.target.value })}
          >
            {LEVELS.map((level) => (
              <option key={level} value={level}>
                {level === ''
                  ? 'All lines'
                  : level === 'critical'
                    ? 'critical'
                    : `${level} and above`}
              </option>
            ))}
          </select>
          {job.attempts.length > 1 && (
            <select
              className="select small"
              aria-label="Attempt"
              value={filter.attempt ?? ''}
              onChange={(event) =>
                setFilter({
                  ...filter,
                  attempt: event.target.value === '' ? null : Number(event.target.value),
                })
              }
            >
              <option value="">All attempts</option>
              {job.attempts.map(({ number }) => (
                <option key={number} value={number}>
                  attempt {number}
                </option>
              ))}
            </select>
          )}
        </div>
        <div className="card-actions">
          <span className="hint">Times in {viewerZone()}</span>
          <a className="button small" href={download} download={`${job.name ?? job.id}.log`}>
            Download
          </a>
        </div>
      </div>
      <Lines key={JSON.stringify(filter)} job={job} filter={filter} />
    </section>
  );
}

function Lines({ job, filter }: { job: Job; filter: LogFilter }) {
  const [lines, setLines] = useState<LogLine[] | null>(null);
  const [before, setBefore] = useState<number | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [attempts, setAttempts] = useState(0);
  const [reading, setReading] = useState(false);
  const [follow, setFollow] = useState(true);
  const place = useRef<HTMLElement>(null);
  const path = jobPath(job.id);
  const query = logQuery(filter);
  const final = job.is_final;
  const lastEvent = useRef(job.last_event);
  lastEvent.current = job.last_event;

  // biome-ignore lint/correctness/useExhaustiveDependencies: read anew when somebody asks for it
  useEffect(() => {
    const stop = new AbortController();
    let close = () => {};
    setError(null);
    // What the stream tells again of what was read already is known by its number.
    const after = lastEvent.current;
    readJson<LogPage>(
      `${path}/logs?${filter.level || filter.text || filter.attempt ? `limit=${TAIL}&before=4611686018427387904&${query}` : `tail=${TAIL}`}`,
      stop.signal,
    )
      .then((page) => {
        setLines(page.lines);
        setBefore(page.next_before);
        if (final) return;
        let waiting: LogLine[] = [];
        let timer: ReturnType<typeof setTimeout> | undefined;
        const flush = () => {
          timer = undefined;
          const fresh = waiting;
          waiting = [];
          setLines((old) => {
            const newest = old?.at(-1)?.seq ?? 0;
            return [...(old ?? []), ...fresh.filter((line) => line.seq > newest)].slice(-KEPT);
          });
        };
        const stopStream = openStream({
          path: `${path}/stream?include=logs`,
          after,
          on: {
            log: (data) => {
              const line = data as LogLine;
              if (!matches(line, filter)) return;
              waiting.push(line);
              timer ??= setTimeout(flush, 250);
            },
          },
        });
        close = () => {
          clearTimeout(timer);
          stopStream();
        };
        if (stop.signal.aborted) close();
      })
      .catch((problem: unknown) => {
        if (!stop.signal.aborted) setError(problem);
      });
    return () => {
      stop.abort();
      close();
    };
  }, [path, query, final, attempts]);

  const count = lines?.length ?? 0;
  const virtual = useVirtualizer({
    count,
    getScrollElement: () => place.current,
    estimateSize: () => 20,
    overscan: 30,
    getItemKey: (index) => lines?.[index]?.seq ?? index,
  });
  useEffect(() => {
    if (follow && count > 0) virtual.scrollToIndex(count - 1, { align: 'end' });
  }, [follow, count, virtual]);

  const older = useCallback(async () => {
    if (before === null) return;
    setReading(true);
    setFollow(false);
    try {
      const page = await readJson<LogPage>(`${path}/logs?limit=${TAIL}&before=${before}&${query}`);
      setLines((old) => [...page.lines, ...(old ?? [])]);
      setBefore(page.next_before);
    } catch (problem) {
      setError(problem);
    } finally {
      setReading(false);
    }
  }, [before, path, query]);

  if (error !== null) return <ErrorState error={error} onRetry={() => setAttempts(attempts + 1)} />;
  if (lines === null) return <Loading label="Reading the log" />;
  if (lines.length === 0 && before === null) {
    return query !== '' ? (
      <EmptyState title="No line fits">Search for less, or show all levels.</EmptyState>
    ) : (
      <EmptyState title="The log is empty">
        {final ? 'The trainer printed nothing.' : 'Lines appear here as the trainer prints them.'}
      </EmptyState>
    );
  }
  return (
    <>
      <div className="row">
        {before !== null && (
          <button
            type="button"
            className="button small"
            disabled={reading}
            onClick={() => void older()}
          >
            {reading ? 'Reading…' : 'Older lines'}
          </button>
        )}
        <label className="check">
          <input
            type="checkbox"
            checked={follow}
            onChange={(event) => setFollow(event.target.checked)}
          />
          Follow the end
        </label>
        <span className="hint">
          {count.toLocaleString('en-US')} lines here, up to {formatTime(lines.at(-1)?.time ?? null)}
        </span>
      </div>
      <section
        className="log"
        ref={place}
        tabIndex={0}
        aria-label="Lines of the log"
        onWheel={(event) => event.deltaY < 0 && setFollow(false)}
        onTouchMove={() => setFollow(false)}
        onKeyDown={(event) => UPWARDS.has(event.key) && setFollow(false)}
      >
        <div className="log-inner" style={{ height: virtual.getTotalSize() }}>
          {virtual.getVirtualItems().map(({ index, start, key }) => {
            const line = lines[index];
            if (!line) return null;
            return (
              <div
                key={key}
                data-index={index}
                ref={virtual.measureElement}
                className={`log-line ${line.level ?? ''}`}
                style={{ transform: `translateY(${start}px)` }}
              >
                <span className="log-time">{formatClock(line.time)}</span>
                <span className="log-text">{line.text}</span>
              </div>
            );
          })}
        </div>
      </section>
    </>
  );
}
