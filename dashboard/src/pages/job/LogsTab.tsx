import { useEffect, useState } from 'react';
import { viewerZone } from '~/format/times';
import { LogLines } from './LogLines';
import { type LogFilter, logQuery } from './logFilter';
import { type Job, jobPath } from './useJob';

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
          <a className="button small" href={download} download>
            Download
          </a>
        </div>
      </div>
      <LogLines key={JSON.stringify(filter)} job={job} filter={filter} />
    </section>
  );
}
