import { useVirtualizer } from '@tanstack/react-virtual';
import { useCallback, useEffect, useRef, useState } from 'react';
import type { Schemas } from '~/api/client';
import { openStream } from '~/api/stream';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { counted } from '~/format/numbers';
import { formatClock, formatTime } from '~/format/times';
import { type LogFilter, logQuery, matches } from './logFilter';
import { type Held, heldOf, withNews, withOlder } from './logLines';
import { type Job, jobPath, readJson } from './useJob';

type LogLine = Schemas['LogLine'];
type LogPage = Schemas['LogPage'];

const TAIL = 1000;
// Above every line's number.
const END = '4611686018427387904';
// Lines are shown together so many milliseconds after the first of them came.
const TOGETHER_MS = 250;
// Keys that lead away from the end.
const UPWARDS = new Set(['ArrowUp', 'PageUp', 'Home']);

/** The lines that fit the filter: the end of them, live, and those before on demand. */
export function LogLines({ job, filter }: { job: Job; filter: LogFilter }) {
  const [held, setHeld] = useState<Held | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [readings, setReadings] = useState(0);
  const [reading, setReading] = useState(false);
  const [follow, setFollow] = useState(true);
  const place = useRef<HTMLElement>(null);
  const path = jobPath(job.id);
  const query = logQuery(filter);
  // As it is when the log is read; the stream goes on to a job's end by itself.
  const now = useRef({ job, follow });
  now.current = { job, follow };

  // biome-ignore lint/correctness/useExhaustiveDependencies: read anew when somebody asks for it
  useEffect(() => {
    const stop = new AbortController();
    let close = () => {};
    setError(null);
    // What the stream tells again of what was read already is known by its number.
    const { last_event: after, is_final: final } = now.current.job;
    readJson<LogPage>(
      `${path}/logs?${query === '' ? `tail=${TAIL}` : `limit=${TAIL}&before=${END}&${query}`}`,
      stop.signal,
    )
      .then((page) => {
        setHeld(heldOf(page));
        if (final || stop.signal.aborted) return;
        let waiting: LogLine[] = [];
        let timer: ReturnType<typeof setTimeout> | undefined;
        const flush = () => {
          timer = undefined;
          const fresh = waiting;
          waiting = [];
          setHeld((old) => old && withNews(old, fresh, now.current.follow));
        };
        const stopStream = openStream({
          path: `${path}/stream?include=logs`,
          after,
          on: {
            log: (data) => {
              const line = data as LogLine;
              if (!matches(line, filter)) return;
              waiting.push(line);
              timer ??= setTimeout(flush, TOGETHER_MS);
            },
            // Lines were removed meanwhile, or the service's database is another one.
            reset: () => setReadings((count) => count + 1),
          },
        });
        close = () => {
          clearTimeout(timer);
          stopStream();
        };
      })
      .catch((problem: unknown) => {
        if (!stop.signal.aborted) setError(problem);
      });
    return () => {
      stop.abort();
      close();
    };
  }, [path, query, readings]);

  const lines = held?.lines ?? null;
  const before = held?.before ?? null;
  const behind = held?.behind ?? false;
  // Whoever goes to the end again, after more came than is held, reads it anew.
  useEffect(() => {
    if (follow && behind) setReadings((count) => count + 1);
  }, [follow, behind]);

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

  // What one looks at stays where it was when older lines are put before it.
  const above = useRef(0);
  // biome-ignore lint/correctness/useExhaustiveDependencies: there are other lines then
  useEffect(() => {
    if (above.current > 0) virtual.scrollToIndex(above.current, { align: 'start' });
    above.current = 0;
  }, [lines, virtual]);

  const older = useCallback(async () => {
    if (before === null) return;
    setReading(true);
    setFollow(false);
    try {
      const page = await readJson<LogPage>(`${path}/logs?limit=${TAIL}&before=${before}&${query}`);
      above.current = page.lines.length;
      setHeld((old) => old && withOlder(old, before, page));
    } catch (problem) {
      setError(problem);
    } finally {
      setReading(false);
    }
  }, [before, path, query]);

  if (error !== null) return <ErrorState error={error} onRetry={() => setReadings(readings + 1)} />;
  if (lines === null) return <Loading label="Reading the log" />;
  if (lines.length === 0 && before === null) {
    return query !== '' ? (
      <EmptyState title="No line fits">Search for less, or show all levels.</EmptyState>
    ) : (
      <EmptyState title="The log is empty">
        {job.is_final
          ? 'The trainer printed nothing.'
          : 'Lines appear here as the trainer prints them.'}
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
          {counted(count, 'line')} here, up to {formatTime(lines.at(-1)?.time ?? null)}
          {behind ? '; more have come, follow the end to read them' : ''}
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
