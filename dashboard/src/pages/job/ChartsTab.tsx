import { useNavigate, useSearch } from '@tanstack/react-router';
import { useMemo } from 'react';
import { ChartControls, ChartGrid } from '~/charts/ChartGrid';
import type { Mark } from '~/charts/lines';
import { useChartView } from '~/charts/useChartView';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { counted } from '~/format/numbers';
import { NAMES, panelsOf } from './panels';
import { type Job, jobPath, useCurves, useLatest } from './useJob';
import { useMarks } from './useMarks';

const ALL = 'all';
// Charts beside the usual ones that one page holds: each is read and drawn.
const MOST = 100;
// Of each series: as many buckets as a chart is wide, fewer where there are many.
const pointsFor = (series: number) => (series <= 24 ? 600 : 400);

/** The curves of a job, with one cursor and one axis for all. */
export default function ChartsTab({ job }: { job: Job }) {
  const view = useChartView();
  const { zoom } = view;
  const { others, chosen, ready, choose } = useOthers(job);
  const names = useMemo(() => [...NAMES, ...chosen], [chosen]);
  const points = pointsFor(names.length);
  const whole = useCurves(job.id, ready ? names : [], null, points);
  const fine = useCurves(job.id, zoom ? names : [], zoom?.steps ?? null, points);
  const marks = useMarks(job, whole.data?.series);

  const series =
    zoom && fine.data && !fine.isPlaceholderData ? fine.data.series : whole.data?.series;
  const { id, name } = job;
  const panels = useMemo(
    () =>
      panelsOf(series ?? [], chosen).map((panel) => ({
        ...panel,
        actions: (
          <a
            className="button quiet small"
            href={`${jobPath(id)}/metrics?${new URLSearchParams(panel.names.map(([each]) => ['name', each]))}&format=csv`}
            download={`${name ?? id}-${panel.title}.csv`}
          >
            CSV
          </a>
        ),
      })),
    [series, chosen, id, name],
  );

  if (whole.isPending) return <Loading label="Reading the curves" />;
  if (whole.isError && !whole.data) {
    return <ErrorState error={whole.error} onRetry={() => void whole.refetch()} />;
  }
  if (panels.length === 0) {
    return (
      <EmptyState title={job.is_final ? 'This job recorded no metrics' : 'No metrics yet'}>
        {job.is_final
          ? 'It ended before its first step. The timeline and the logs say why.'
          : 'They appear here with the first step.'}
      </EmptyState>
    );
  }
  return (
    <>
      <ChartControls view={view}>
        <MoreCharts others={others} chosen={chosen} choose={choose} />
        <span className="hint">
          {zoom
            ? `Steps ${zoom.steps[0].toLocaleString('en-US')} to ${zoom.steps[1].toLocaleString('en-US')}${fine.isFetching ? ', reading finer points…' : ''}`
            : 'Drag over a chart to zoom; a double click shows all again.'}
        </span>
      </ChartControls>
      <ChartGrid
        view={view}
        panels={panels}
        zoomBy="first line"
        syncKey={`job-${job.id}`}
        marks={marks}
      />
      <Legend marks={marks} />
    </>
  );
}

// A name may hold a comma.
const addressOf = (names: readonly string[]) => names.map(encodeURIComponent).join(',');
const namesIn = (charts: string) => charts.split(',').filter(Boolean).map(decodeURIComponent);

/** The metrics without a chart of their own, and those that the address asks for all the same. */
function useOthers(job: Job) {
  const { charts = '' } = useSearch({ strict: false }) as { charts?: string };
  const navigate = useNavigate();
  const latest = useLatest(job);
  const others = useMemo(
    () =>
      (latest.data?.items ?? []).map(({ name }) => name).filter((name) => !NAMES.includes(name)),
    [latest.data],
  );
  const chosen = useMemo(
    () => (charts === ALL ? others : namesIn(charts)).slice(0, MOST),
    [charts, others],
  );
  return {
    others,
    chosen,
    // Nothing is read twice: all of them are known once their names are.
    ready: charts !== ALL || !latest.isPending,
    choose: (next: string) =>
      void navigate({
        to: '.',
        search: (old) => ({ ...old, charts: next }),
        replace: true,
        resetScroll: false,
      }),
  };
}

function MoreCharts(props: {
  others: readonly string[];
  chosen: readonly string[];
  choose: (charts: string) => void;
}) {
  const { chosen, choose } = props;
  const hidden = props.others.filter((name) => !chosen.includes(name));
  return (
    <>
      {hidden.length > 0 && (
        <select
          className="select small"
          aria-label="Add a chart"
          value=""
          onChange={(event) => {
            const { value } = event.target;
            if (value !== '') choose(value === ALL ? ALL : addressOf([...chosen, value]));
          }}
        >
          <option value="">Add a chart…</option>
          <option value={ALL}>
            {hidden.length > MOST ? `the first ${MOST} of them` : `all ${hidden.length} others`}
          </option>
          {hidden.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      )}
      {chosen.length > 0 && (
        <button type="button" className="button small" onClick={() => choose('')}>
          The usual charts
        </button>
      )}
    </>
  );
}

function Legend({ marks }: { marks: readonly Mark[] }) {
  const count = (kind: Mark['kind']) => marks.filter((mark) => mark.kind === kind).length;
  return (
    <p className="hint">
      <span className="key checkpoint" aria-hidden="true">
        ▲
      </span>{' '}
      {counted(count('checkpoint'), 'checkpoint')} kept,{' '}
      <span className="key alarm" aria-hidden="true">
        ●
      </span>{' '}
      {counted(count('alarm'), 'alarm')}, dashed lines: {counted(count('attempt'), 'restart')}.
      Faint lines are the raw values where smoothing is on; a shade spans the least and the greatest
      value of each bucket.
    </p>
  );
}
