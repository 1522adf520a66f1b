import { useMemo, useState } from 'react';
import { Chart, type Line, type Mark } from '~/charts/Chart';
import { type Curve, curveOf, spanOf, stepsOf, type XAxis } from '~/charts/curves';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatBytes, formatCompact, formatNumber, formatPercent } from '~/format/numbers';
import { type Job, jobPath, useCheckpoints, useCurves, useEvents, useLatest } from './useJob';

interface Panel {
  title: string;
  names: readonly [name: string, label: string][];
  format?: (value: number | null) => string;
  log?: boolean;
  steady?: boolean;
}

// biome-ignore format: a table
const PANELS: Panel[] = [
  { title: 'Loss', names: [['train/loss', 'training'], ['eval/loss', 'evaluation'], ['parity/reference_loss', 'reference']], log: true },
  { title: 'Gap to the reference', names: [['parity/gap', 'gap']], format: formatPercent },
  { title: 'Gradient norm', names: [['train/grad_norm', 'norm']], log: true },
  { title: 'Learning rate', names: [['train/lr', 'rate']], steady: true },
  { title: 'Throughput, tokens/s', names: [['perf/tokens_per_second', 'tokens/s']], format: formatCompact },
  { title: 'Peak memory', names: [['memory/peak_bytes', 'peak']], format: formatBytes, steady: true },
  { title: 'GPU utilization', names: [['gpu/utilization', 'GPU']], format: formatPercent },
  { title: 'GPU memory', names: [['gpu/memory_bytes', 'memory']], format: formatBytes, steady: true },
  { title: 'GPU power, W', names: [['gpu/power_watts', 'power']] },
];
const NAMES = PANELS.flatMap(({ names }) => names.map(([name]) => name));
const COLOURS = ['--series-1', '--series-2', '--series-3', '--series-4'];
const SMOOTHING = [0, 0.6, 0.9, 0.98];

/** The curves of a job, with one cursor and one axis for all. */
export default function ChartsTab({ job }: { job: Job }) {
  const [axis, setAxis] = useState<XAxis>('step');
  const [log, setLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const [zoom, setZoom] = useState<{ span: [number, number]; steps: [number, number] } | null>(
    null,
  );
  const [extra, setExtra] = useState<string[]>([]);
  const names = useMemo(() => [...NAMES, ...extra], [extra]);
  const whole = useCurves(job.id, names, null);
  const fine = useCurves(job.id, zoom ? names : [], zoom?.steps ?? null);
  const marks = useMarks(job, whole.data?.series);

  const series =
    zoom && fine.data && !fine.isPlaceholderData ? fine.data.series : whole.data?.series;
  const panels = useMemo(() => {
    const all: Panel[] = [
      ...PANELS,
      ...extra.map((name) => ({ title: name, names: [[name, name]] as [string, string][] })),
    ];
    return all.flatMap((panel) => {
      const lines = panel.names.flatMap(([name, label], index): Line[] => {
        const curve = curveOf(series ?? [], name);
        return curve === null
          ? []
          : [
              {
                label,
                curve,
                colour: COLOURS[index] ?? '--series-1',
                dashed: name === 'parity/reference_loss',
                steady: panel.steady || name.startsWith('eval/'),
                band: index === 0 && curve.width > 1,
              },
            ];
      });
      return lines.length > 0 ? [{ ...panel, lines }] : [];
    });
  }, [series, extra]);

  // All charts have one axis, also those whose curve ends before.
  const all = useMemo(
    () =>
      spanOf(
        panels.flatMap(({ lines }) => lines.map(({ curve }) => curve)),
        axis,
      ),
    [panels, axis],
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

  function select(span: [number, number] | null) {
    if (span === null) {
      setZoom(null);
      return;
    }
    const reference: Curve | undefined = panels[0]?.lines[0]?.curve;
    const steps = reference ? stepsOf(reference, axis, span[0], span[1]) : null;
    if (steps) setZoom({ span, steps });
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
        <MoreCharts job={job} shown={names} onAdd={(name) => setExtra([...extra, name])} />
        {zoom && (
          <button type="button" className="button small" onClick={() => setZoom(null)}>
            Show all steps
          </button>
        )}
        <span className="hint">
          {zoom
            ? `Steps ${zoom.steps[0].toLocaleString('en-US')} to ${zoom.steps[1].toLocaleString('en-US')}${fine.isFetching ? ', reading finer points…' : ''}`
            : 'Drag over a chart to zoom; a double click shows all again.'}
        </span>
      </Controls>
      <div className="charts">
        {panels.map((panel) => (
          <Chart
            key={panel.title}
            title={panel.title}
            lines={panel.lines}
            axis={axis}
            log={log && (panel.log ?? false)}
            smoothing={smoothing}
            marks={marks}
            span={zoom?.span ?? all}
            onSpan={select}
            format={panel.format ?? formatNumber}
            syncKey={`job-${job.id}`}
            actions={
              <a
                className="button quiet small"
                href={`${jobPath(job.id)}/metrics?${new URLSearchParams(panel.names.map(([name]) => ['name', name]))}&format=csv`}
                download={`${job.name ?? job.id}-${panel.title}.csv`}
              >
                CSV
              </a>
            }
          />
        ))}
      </div>
      <Legend job={job} marks={marks} />
    </>
  );
}

/** What all charts of a page have in common. */
export function Controls(props: {
  axis: XAxis;
  setAxis: (axis: XAxis) => void;
  log: boolean;
  setLog: (log: boolean) => void;
  smoothing: number;
  setSmoothing: (weight: number) => void;
  children?: React.ReactNode;
}) {
  const axes: [XAxis, string][] = [
    ['step', 'Step'],
    ['time', 'Time'],
    ['tokens', 'Tokens'],
  ];
  return (
    <div className="row controls">
      <fieldset className="segmented" aria-label="Horizontal axis">
        {axes.map(([value, label]) => (
          <button
            key={value}
            type="button"
            aria-pressed={props.axis === value}
            onClick={() => props.setAxis(value)}
          >
            {label}
          </button>
        ))}
      </fieldset>
      <label className="check">
        Smoothing
        <select
          className="select small"
          value={props.smoothing}
          onChange={(event) => props.setSmoothing(Number(event.target.value))}
        >
          {SMOOTHING.map((weight) => (
            <option key={weight} value={weight}>
              {weight === 0 ? 'none' : weight}
            </option>
          ))}
        </select>
      </label>
      <label className="check">
        <input
          type="checkbox"
          checked={props.log}
          onChange={(event) => props.setLog(event.target.checked)}
        />
        Log axis of loss and norm
      </label>
      {props.children}
    </div>
  );
}

/** Attempts after the first, checkpoints and alarms, at their steps. */
function useMarks(job: Job, series: Parameters<typeof curveOf>[0] | undefined): Mark[] {
  const checkpoints = useCheckpoints(job.id).data?.items;
  const alarms = useEvents(
    job.id,
    ['fp8_alarm', 'parity_beyond', 'step_skipped', 'fallback_bf16', 'diverged'],
    500,
  ).data?.items;
  return useMemo(() => {
    const marks: Mark[] = [];
    for (const { attempt, step } of curveOf(series ?? [], 'train/loss')?.attempts.slice(1) ?? []) {
      marks.push({ step, kind: 'attempt', label: `attempt ${attempt}` });
    }
    for (const { step } of checkpoints ?? []) {
      if (step !== null) marks.push({ step, kind: 'checkpoint', label: `checkpoint ${step}` });
    }
    for (const { data, message } of alarms ?? []) {
      const step = (data as { step?: unknown }).step;
      if (typeof step === 'number') marks.push({ step, kind: 'alarm', label: message });
    }
    return marks;
  }, [series, checkpoints, alarms]);
}

function Legend({ marks }: { job: Job; marks: Mark[] }) {
  const count = (kind: Mark['kind']) => marks.filter((mark) => mark.kind === kind).length;
  return (
    <p className="hint">
      <span className="key checkpoint" aria-hidden="true">
        ▲
      </span>{' '}
      {count('checkpoint')} checkpoints kept,{' '}
      <span className="key alarm" aria-hidden="true">
        ●
      </span>{' '}
      {count('alarm')} alarms, dashed lines: {count('attempt')} restarts. Faint lines are the raw
      values where smoothing is on; a shade spans the least and the greatest value of each bucket.
    </p>
  );
}

function MoreCharts(props: { job: Job; shown: readonly string[]; onAdd: (name: string) => void }) {
  const latest = useLatest(props.job.id);
  const others = (latest.data?.items ?? [])
    .map(({ name }) => name)
    .filter((name) => !props.shown.includes(name));
  if (others.length === 0) return null;
  return (
    <select
      className="select small"
      aria-label="Add a chart"
      value=""
      onChange={(event) => event.target.value && props.onAdd(event.target.value)}
    >
      <option value="">Add a chart…</option>
      {others.map((name) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  );
}
