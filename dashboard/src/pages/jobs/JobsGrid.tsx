import { useNavigate } from '@tanstack/react-router';
import { useVirtualizer } from '@tanstack/react-virtual';
import { type MouseEvent, memo, useCallback, useEffect, useRef } from 'react';
import { useMediaQuery } from '~/app/useMediaQuery';
import { sparklinePath } from '~/charts/sparkline';
import { Ago } from '~/components/Ago';
import { LabelText } from '~/components/Name';
import { ProgressBar } from '~/components/Progress';
import { StatusBadge } from '~/components/StatusBadge';
import { formatCompact, formatNumber, formatPercent } from '~/format/numbers';
import { formatAge } from '~/format/times';
import { phaseOf } from '~/pages/job/trained';
import type { JobRow } from './rows';
import { useSparklines } from './useSparklines';

interface Props {
  rows: JobRow[];
  sort: string;
  onSort: (sort: string) => void;
  picked: ReadonlySet<string>;
  onPick: (id: string, on: boolean) => void;
  onPickAll: (on: boolean) => void;
  onLabel: (name: string, value: string) => void;
  onEnd: () => void;
}

// biome-ignore format: a table
const COLUMNS: { label: string; sort?: string; end?: boolean }[] = [
  { label: 'Job', sort: 'name' }, { label: 'Status', sort: 'status' }, { label: 'Progress' }, { label: 'Loss' },
  { label: 'Tokens/s', end: true }, { label: 'Device' }, { label: 'Age', sort: 'created_at' },
  { label: 'Owner' }, { label: 'Labels' },
];

/** The list itself. Only the rows in view are elements of the page, whatever their number. */
export function JobsGrid(props: Props) {
  const narrow = useMediaQuery('(max-width: 760px)');
  const place = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({
    count: props.rows.length,
    getScrollElement: () => place.current,
    estimateSize: () => (narrow ? 132 : 56),
    overscan: 8,
    getItemKey: (index) => props.rows[index]?.id ?? index,
  });
  // biome-ignore lint/correctness/useExhaustiveDependencies: rows have another height then
  useEffect(() => virtual.measure(), [narrow]);

  const items = virtual.getVirtualItems();
  const shown = items.flatMap(({ index }) => props.rows[index] ?? []);
  const curves = useSparklines(shown);
  const last = items.at(-1)?.index ?? 0;
  const { onEnd, rows } = props;
  useEffect(() => {
    if (last >= rows.length - 40) onEnd();
  }, [last, rows.length, onEnd]);

  // A router's link in each row would cost more than the rest of the row.
  const navigate = useNavigate();
  const open = useCallback(
    (event: MouseEvent, jobId: string) => {
      if (event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      void navigate({ to: '/jobs/$jobId', params: { jobId }, search: {} });
    },
    [navigate],
  );

  const all = props.rows.length > 0 && props.picked.size === props.rows.length;
  return (
    <div
      className="grid"
      ref={place}
      role="table"
      aria-label="Jobs"
      aria-rowcount={props.rows.length + 1}
      tabIndex={0}
    >
      <div className="grid-inner">
        <div className="grid-row grid-head" role="row">
          <span role="columnheader">
            <input
              type="checkbox"
              aria-label="Select all that are listed"
              checked={all}
              onChange={(event) => props.onPickAll(event.target.checked)}
            />
          </span>
          {COLUMNS.map((column) => (
            <HeadCell key={column.label} {...column} current={props.sort} onSort={props.onSort} />
          ))}
        </div>
        <div className="grid-body" role="rowgroup" style={{ height: virtual.getTotalSize() }}>
          {items.map(({ index, start, key }) => {
            const job = props.rows[index];
            if (!job) return null;
            return (
              <Row
                key={key}
                index={index}
                start={start}
                job={job}
                curve={curves.get(job.id)}
                picked={props.picked.has(job.id)}
                onOpen={open}
                onPick={props.onPick}
                onLabel={props.onLabel}
              />
            );
          })}
        </div>
      </div>
    </div>
  );
}

function HeadCell(props: {
  label: string;
  sort?: string;
  end?: boolean;
  current: string;
  onSort: (sort: string) => void;
}) {
  const { sort, current } = props;
  // The age grows as the time of creation falls.
  const up = sort === 'created_at' ? '-created_at' : sort;
  const down = sort === 'created_at' ? 'created_at' : `-${sort}`;
  const state = current === up ? 'ascending' : current === down ? 'descending' : undefined;
  return (
    <span role="columnheader" aria-sort={state} className={props.end ? 'number' : undefined}>
      {sort ? (
        <button
          type="button"
          className="sort"
          onClick={() => props.onSort(current === up ? down : (up ?? ''))}
        >
          {props.label}
          <span aria-hidden="true">
            {state === 'ascending' ? ' ↑' : state === 'descending' ? ' ↓' : ''}
          </span>
        </button>
      ) : (
        props.label
      )}
    </span>
  );
}

const Row = memo(function Row(props: {
  job: JobRow;
  index: number;
  start: number;
  curve: number[] | undefined;
  picked: boolean;
  onOpen: (event: MouseEvent, jobId: string) => void;
  onPick: (id: string, on: boolean) => void;
  onLabel: (name: string, value: string) => void;
}) {
  const { job } = props;
  const name = job.name ?? job.id;
  const speed = job.latest_metrics['perf/tokens_per_second'];
  const cell = { className: 'cell', role: 'cell' } as const;
  return (
    <div
      className={props.picked ? 'grid-row picked' : 'grid-row'}
      role="row"
      aria-rowindex={props.index + 2}
      style={{ transform: `translateY(${props.start}px)` }}
    >
      <span {...cell} data-cell="pick">
        <input
          type="checkbox"
          aria-label={`Select ${name}`}
          checked={props.picked}
          onChange={(event) => props.onPick(job.id, event.target.checked)}
        />
      </span>
      <span {...cell} data-cell="job">
        <a
          href={`${import.meta.env.BASE_URL}jobs/${job.id}`}
          className="job-link line"
          dir="auto"
          title={name}
          onClick={(event) => props.onOpen(event, job.id)}
        >
          {name}
        </a>
        <span className="line sub mono">{job.id}</span>
      </span>
      <span {...cell} data-cell="status">
        <StatusBadge
          status={job.status}
          reason={job.status === 'queued' ? null : job.reason}
          detail={job.detail}
        />
        <Why job={job} />
      </span>
      <span {...cell} data-cell="progress">
        <Progress job={job} />
      </span>
      <span {...cell} data-cell="loss">
        <Loss job={job} curve={props.curve} />
      </span>
      <span {...cell} data-cell="speed" data-none={speed === undefined} className="cell number">
        {formatCompact(speed)}
      </span>
      <span {...cell} data-cell="device">
        <Device job={job} />
      </span>
      <span {...cell} data-cell="age">
        <Ago time={job.created_at} />
      </span>
      <span {...cell} data-cell="owner">
        <span className="line" title={job.owner}>
          <bdi>{job.owner}</bdi>
        </span>
      </span>
      <span {...cell} data-cell="labels">
        <span className="chips">
          {Object.entries(job.labels).map(([label, value]) => (
            <button
              key={label}
              type="button"
              className="chip"
              title={`Only jobs with ${label}=${value}`}
              onClick={() => props.onLabel(label, value)}
            >
              <LabelText name={label} value={value} />
            </button>
          ))}
        </span>
      </span>
    </div>
  );
});

/** Where a queued job stands and what it waits for; else the detail of what happened. */
function Why({ job }: { job: JobRow }) {
  if (job.status === 'queued') {
    const place = job.queue_position === null ? '' : `#${job.queue_position} in the queue`;
    const text = [place, job.waiting_for && `waits for ${job.waiting_for}`]
      .filter(Boolean)
      .join(', ');
    return (
      <span className="line sub" title={text}>
        {text}
      </span>
    );
  }
  const attempt = job.attempts.at(-1);
  const trouble = attempt?.unreachable_since
    ? 'its node cannot be reached'
    : attempt?.stalled_since
      ? 'no progress for a while'
      : null;
  const text = job.is_final ? job.detail : (trouble ?? job.detail ?? phaseOf(job.attempts));
  if (!text || text === job.status || job.reason === 'completed') return null;
  return (
    <span className="line sub" title={text}>
      {text}
    </span>
  );
}

function Progress({ job }: { job: JobRow }) {
  const { step, total_steps, eta_seconds } = job.progress;
  if (step === 0 && total_steps === null) return <span className="muted">–</span>;
  const tone =
    job.status === 'failed'
      ? 'bad'
      : job.is_final && job.status !== 'succeeded'
        ? 'idle'
        : undefined;
  return (
    <>
      <span className="line">
        {step.toLocaleString('en-US')}
        <span className="muted"> / {total_steps?.toLocaleString('en-US') ?? '?'}</span>
      </span>
      <ProgressBar step={step} total={total_steps} tone={tone} label="Steps done" />
      {job.status === 'running' && eta_seconds !== null && (
        <span className="line sub">{formatAge(eta_seconds)} left</span>
      )}
    </>
  );
}

function Loss({ job, curve }: { job: JobRow; curve: number[] | undefined }) {
  const value = job.latest_metrics['train/loss'];
  if (value === undefined) return <span className="muted">–</span>;
  const path = curve ? sparklinePath(curve, 72, 26) : '';
  return (
    <span className="loss">
      <span>{formatNumber(value)}</span>
      {path !== '' && (
        <svg className="sparkline" viewBox="0 0 72 26" aria-hidden="true">
          <path d={path} />
        </svg>
      )}
    </span>
  );
}

function Device({ job }: { job: JobRow }) {
  const attempt = job.attempts.at(-1);
  const use = job.latest_metrics['gpu/utilization'];
  if (!job.device) return <span className="muted">–</span>;
  return (
    <>
      <span className="line">
        {job.device === 'cuda' ? 'GPU' : job.device.toUpperCase()}
        {use !== undefined && !job.is_final ? ` ${formatPercent(use, 2)}` : ''}
      </span>
      {attempt && (
        <span className="line sub" title={attempt.node}>
          {attempt.node}
        </span>
      )}
    </>
  );
}
