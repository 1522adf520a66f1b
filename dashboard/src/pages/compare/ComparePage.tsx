import { keepPreviousData, useQueries, useQuery } from '@tanstack/react-query';
import { Link, useNavigate, useSearch } from '@tanstack/react-router';
import { useMemo } from 'react';
import type { Schemas } from '~/api/client';
import { ChartControls, ChartGrid } from '~/charts/ChartGrid';
import { type Curve, curveOf } from '~/charts/curves';
import type { Line } from '~/charts/lines';
import { useChartView } from '~/charts/useChartView';
import { Name } from '~/components/Name';
import { Page } from '~/components/Page';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { type Format, formatBytes, formatCompact } from '~/format/numbers';
import { type Job, jobPath, readJson } from '~/pages/job/useJob';
import { Differences, Figures } from './ComparedTables';
import { JobPicker } from './JobPicker';

const MOST = 20;
const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `--series-${number}`);
// Beyond the eighth job colours come again, dashed.
const colourOf = (index: number) => COLOURS[index % COLOURS.length] ?? '--series-1';

// biome-ignore format: a table
const PANELS: { title: string; name: string; log?: boolean; zero?: boolean; format?: Format }[] = [
  { title: 'Training loss', name: 'train/loss', log: true },
  { title: 'Evaluation loss', name: 'eval/loss', log: true },
  { title: 'Gradient norm', name: 'train/grad_norm', log: true },
  { title: 'Throughput, tokens/s', name: 'perf/tokens_per_second', format: formatCompact, zero: true },
  { title: 'Peak memory', name: 'memory/peak_bytes', format: formatBytes, zero: true },
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
                    <Name>{job?.name ?? id}</Name>
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
  const view = useChartView();
  const { axis, zoom } = view;
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

  return (
    <>
      <ChartControls view={view} />
      {whole.isPending ? (
        <Loading label="Reading the curves" />
      ) : whole.isError && !whole.data ? (
        <ErrorState error={whole.error} onRetry={() => void whole.refetch()} />
      ) : panels.length === 0 ? (
        <EmptyState title="None of these jobs has metrics yet" />
      ) : (
        <ChartGrid
          view={view}
          panels={panels}
          zoomBy="all lines"
          elapsed={axis === 'time'}
          syncKey="compare"
        />
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
