import { keepPreviousData, useQueries, useQuery } from '@tanstack/react-query';
import { Link, useNavigate, useSearch } from '@tanstack/react-router';
import { useMemo, useState } from 'react';
import type { Schemas } from '~/api/client';
import { Chart, type Line } from '~/charts/Chart';
import { type Curve, curveOf, median, spanOf, stepsOf, type XAxis } from '~/charts/curves';
import { Card, Page, Wide } from '~/components/Page';
import { StatusBadge } from '~/components/StatusBadge';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatBytes, formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration, secondsSince } from '~/format/times';
import { Controls } from '~/pages/job/ChartsTab';
import type { Json } from '~/pages/job/specDefaults';
import { type Job, jobPath, readJson } from '~/pages/job/useJob';
import { JobPicker } from './JobPicker';
import { differences } from './specDiff';

const MOST = 20;
const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `--series-${number}`);
// Beyond the eighth job colours come again, dashed.
const colourOf = (index: number) => COLOURS[index % COLOURS.length] ?? '--series-1';

// biome-ignore format: a table
const PANELS: { title: string; name: string; log?: boolean; format?: (value: number | null) => string }[] = [
  { title: 'Training loss', name: 'train/loss', log: true },
  { title: 'Evaluation loss', name: 'eval/loss', log: true },
  { title: 'Gradient norm', name: 'train/grad_norm', log: true },
  { title: 'Throughput, tokens/s', name: 'perf/tokens_per_second', format: formatCompact },
  { title: 'Peak memory', name: 'memory/peak_bytes', format: formatBytes },
];

export default function ComparePage() {
  const search = useSearch({ strict: false }) as { jobs?: string };
  const navigate = useNavigate();
  const ids = useMemo(
    () => [...new Set((search.jobs ?? '').split(',').filter(Boolean))].slice(0, MOST),
    [search.jobs],
  );
  const set = (next: readonly string[]) =>
    void navigate({
      to: '/compare',
      search: next.length > 0 ? { jobs: next.join(',') } : {},
    });
  const queries = useQueries({
    queries: ids.map((id) => ({
      queryKey: ['job', id, 'object'],
      queryFn: ({ signal }: { signal: AbortSignal }) => readJson<Job>(jobPath(id), signal),
      refetchInterval: ({ state }: { state: { data?: Job } }) =>
        (state.data?.is_final ? false : 5000) as number | false,
    })),
  });
  const jobs = queries.flatMap(({ data }) => data ?? []);
  const failed = queries.findIndex(({ isError, data }) => isError && data === undefined);
  return (
    <Page
      title="Compare"
      actions={ids.length < MOST && <JobPicker chosen={ids} onAdd={(id) => set([...ids, id])} />}
    >
      {ids.length === 0 ? (
        <EmptyState title="No jobs chosen">
          Select jobs in the list and press Compare, or search for one above.
        </EmptyState>
      ) : (
        <>
          <ul className="chips compared">
            {ids.map((id, index) => {
              const job = jobs.find((each) => each.id === id);
              return (
                <li key={id} className="compared-job">
                  <span
                    className="swatch"
                    style={{ background: `var(${colourOf(index)})` }}
                    aria-hidden="true"
                  />
                  <Link to="/jobs/$jobId" params={{ jobId: id }}>
                    {job?.name ?? id}
                  </Link>
                  <button
                    type="button"
                    className="button quiet small"
                    aria-label={`Remove ${job?.name ?? id}`}
                    onClick={() => set(ids.filter((each) => each !== id))}
                  >
                    ×
                  </button>
                </li>
              );
            })}
          </ul>
          {failed >= 0 && (
            <ErrorState
              error={queries[failed]?.error}
              onRetry={() => void queries[failed]?.refetch()}
            />
          )}
          {jobs.length < ids.length && failed < 0 ? (
            <Loading label="Reading the jobs" />
          ) : (
            jobs.length > 0 && <Comparison jobs={jobs} ids={ids} />
          )}
        </>
      )}
    </Page>
  );
}

function Comparison({ jobs, ids }: { jobs: Job[]; ids: readonly string[] }) {
  const [axis, setAxis] = useState<XAxis>('step');
  const [log, setLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const [zoom, setZoom] = useState<{ span: [number, number]; steps: [number, number] } | null>(
    null,
  );
  const running = jobs.some((job) => !job.is_final);
  const whole = useJobCurves(jobs, null, running);
  const fine = useJobCurves(zoom ? jobs : [], zoom?.steps ?? null, running);
  const series =
    zoom && fine.data && !fine.isPlaceholderData ? fine.data.series : whole.data?.series;
  const panels = useMemo(
    () =>
      PANELS.flatMap((panel) => {
        const lines = jobs.flatMap((job): Line[] => {
          const curve = curveOf(series ?? [], panel.name, job.id);
          const index = ids.indexOf(job.id);
          if (curve === null) return [];
          return [
            {
              label: job.name ?? job.id,
              colour: colourOf(index),
              dashed: index >= COLOURS.length,
              steady: panel.name.startsWith('eval/') || panel.name.startsWith('memory/'),
              curve: axis === 'time' ? sinceStart(curve) : curve,
            },
          ];
        });
        return lines.length > 0 ? [{ ...panel, lines }] : [];
      }),
    [series, jobs, ids, axis],
  );

  const all = useMemo(
    () =>
      spanOf(
        panels.flatMap(({ lines }) => lines.map(({ curve }) => curve)),
        axis,
      ),
    [panels, axis],
  );

  function select(span: [number, number] | null) {
    if (span === null) {
      setZoom(null);
      return;
    }
    const covered = (panels[0]?.lines ?? []).flatMap(({ curve }) => {
      const steps = stepsOf(curve, axis, span[0], span[1]);
      return steps ? [steps] : [];
    });
    if (covered.length === 0) return;
    const first = Math.min(...covered.map(([step]) => step));
    const last = Math.max(...covered.map(([, step]) => step));
    setZoom({ span, steps: [first, last] });
  }

  return (
    <>
      <Controls
        axis={axis}
        setAxis={(next) => {
          setAxis(next);
          setZoom(null);
        }}
        log={log}
        setLog={setLog}
        smoothing={smoothing}
        setSmoothing={setSmoothing}
      >
        {zoom && (
          <button type="button" className="button small" onClick={() => setZoom(null)}>
            Show all steps
          </button>
        )}
      </Controls>
      {whole.isPending ? (
        <Loading label="Reading the curves" />
      ) : whole.isError && !whole.data ? (
        <ErrorState error={whole.error} onRetry={() => void whole.refetch()} />
      ) : panels.length === 0 ? (
        <EmptyState title="None of these jobs has metrics yet" />
      ) : (
        <div className="charts">
          {panels.map((panel) => (
            <Chart
              key={panel.title}
              title={panel.title}
              lines={panel.lines}
              axis={axis}
              elapsed={axis === 'time'}
              log={log && (panel.log ?? false)}
              smoothing={smoothing}
              span={zoom?.span ?? all}
              onSpan={select}
              format={panel.format ?? formatNumber}
              syncKey="compare"
            />
          ))}
        </div>
      )}
      <Figures jobs={jobs} series={whole.data?.series ?? []} />
      <Differences jobs={jobs} />
    </>
  );
}

/** Jobs ran at different hours: their times are counted from each one's first point. */
function sinceStart(curve: Curve): Curve {
  const begin = curve.time.find((time) => time !== null) ?? 0;
  return { ...curve, time: curve.time.map((time) => (time === null ? null : time - begin)) };
}

function useJobCurves(
  jobs: readonly Job[],
  steps: readonly [number, number] | null,
  running: boolean,
) {
  const ids = jobs.map((job) => job.id);
  return useQuery({
    queryKey: ['compare', ids, steps],
    queryFn: ({ signal }) => {
      const query = new URLSearchParams([
        ...ids.map((id) => ['job', id]),
        ...PANELS.map(({ name }) => ['name', name]),
        ['form', 'buckets'],
        // Buckets have one width for all: the shortest job must not be left with a few.
        ['max_points', ids.length <= 4 ? '1500' : '500'],
      ]);
      if (steps) {
        query.set('from_step', String(steps[0]));
        query.set('to_step', String(steps[1]));
      }
      return readJson<Schemas['JobsSeries']>(`/v1/metrics/query?${query}`, signal);
    },
    enabled: ids.length > 0,
    placeholderData: keepPreviousData,
    refetchInterval: running ? 5000 : false,
  });
}

function Figures({ jobs, series }: { jobs: Job[]; series: readonly Schemas['Series'][] }) {
  return (
    <Card title="Figures">
      <Wide label="Figures of the jobs">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Job</th>
              <th scope="col">Status</th>
              <th scope="col" className="number">
                Steps
              </th>
              <th scope="col" className="number">
                Loss
              </th>
              <th scope="col" className="number">
                Evaluation loss
              </th>
              <th scope="col" className="number">
                Tokens/s, median
              </th>
              <th scope="col" className="number">
                Peak memory
              </th>
              <th scope="col" className="number">
                Time
              </th>
            </tr>
          </thead>
          <tbody>
            {jobs.map((job) => {
              const memory = (curveOf(series, 'memory/peak_bytes', job.id)?.max ?? []).filter(
                (value) => value !== null,
              );
              const end = job.ended_at ? Date.parse(job.ended_at) : Date.now();
              return (
                <tr key={job.id}>
                  <td className="nowrap">{job.name ?? job.id}</td>
                  <td>
                    <StatusBadge status={job.status} reason={job.reason} detail={job.detail} />
                  </td>
                  <td className="number">{job.progress.step.toLocaleString('en-US')}</td>
                  <td className="number">{formatNumber(job.latest_metrics['train/loss'])}</td>
                  <td className="number">{formatNumber(job.latest_metrics['eval/loss'])}</td>
                  <td className="number">
                    {formatCompact(
                      median(curveOf(series, 'perf/tokens_per_second', job.id)?.mean ?? []),
                    )}
                  </td>
                  <td className="number">
                    {memory.length > 0 ? formatBytes(Math.max(...memory)) : '–'}
                  </td>
                  <td className="number">{formatDuration(secondsSince(job.started_at, end))}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Wide>
    </Card>
  );
}

function Differences({ jobs }: { jobs: Job[] }) {
  const rows = useMemo(
    () => differences(jobs.map((job) => job.spec as { [name: string]: Json })),
    [jobs],
  );
  if (jobs.length < 2) return null;
  return (
    <Card title="Differences of recipe and spec">
      {rows.length === 0 ? (
        <p className="muted">The specs of these jobs are the same, but for names and labels.</p>
      ) : (
        <Wide label="Differences of the specs">
          <table className="table">
            <thead>
              <tr>
                <th scope="col">Field</th>
                {jobs.map((job) => (
                  <th key={job.id} scope="col">
                    {job.name ?? job.id}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map(({ path, values }) => (
                <tr key={path}>
                  <td>
                    <code>{path}</code>
                  </td>
                  {values.map((value, index) => (
                    <td key={jobs[index]?.id ?? index}>
                      {value === undefined ? (
                        <span className="muted">–</span>
                      ) : (
                        <code>{JSON.stringify(value)}</code>
                      )}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </Wide>
      )}
    </Card>
  );
}
