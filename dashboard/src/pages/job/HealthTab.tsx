import { lazy, Suspense, useCallback, useMemo, useState } from 'react';
import type { Schemas } from '~/api/client';
import { ApiError } from '~/api/problem';
import { type CellPlace, placeOf } from '~/charts/heatPicture';
import { Card } from '~/components/Page';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { formatNumber, formatPercent } from '~/format/numbers';
import { AlarmList } from './AlarmList';
import {
  type Alarm,
  alarmsOf,
  FIGURES,
  type Figure,
  heatOf,
  readingOf,
  type Spot,
  TENSORS,
  type Tensor,
  unwatched,
} from './health';
import { LayerTable } from './LayerTable';
import { PrecisionCard } from './PrecisionCard';
import { ReferenceCard } from './ReferenceCard';
import { type Job, useConversion, useCurves, useEvents } from './useJob';

// The figure that shows what an alarm is about.
const FIGURE_OF: Record<string, Figure> = { saturation: 'saturated', infinite_amax: 'amax' };
const NO_ROWS: Schemas['ConversionReport']['rows'] = [];
const ALL_WELL = 'No scale was frozen, no amax infinite and no tensor cut off beyond 1 %.';
const Heatmap = lazy(() => import('~/charts/Heatmap'));

/** Whether FP8 helps or harms: by layer and step, in figures, and against a reference. */
export default function HealthTab({ job }: { job: Job }) {
  const [spot, setSpot] = useState<Spot | null>(null);
  const [tensor, setTensor] = useState<Tensor>('grad_output');
  const [figure, setFigure] = useState<Figure>('saturated');
  const conversion = useConversion(job);
  const events = useEvents(job.id, ['fp8_alarm'], 500);
  const alarms = useMemo(() => alarmsOf(events.data?.items ?? []), [events.data]);
  const rows = conversion.data?.rows ?? NO_ROWS;
  const order = useMemo(() => rows.map((row) => String(row.name)), [rows]);

  const showAlarm = useCallback((alarm: Alarm) => {
    setSpot({ layer: alarm.layer, step: alarm.step });
    if (alarm.tensor in TENSORS) setTensor(alarm.tensor as Tensor);
    setFigure(FIGURE_OF[alarm.what] ?? 'scale');
  }, []);

  if (job.attempt === 0) {
    return (
      <EmptyState title="Not started yet">
        Which layers train in FP8, and how well, is known with the first step.
      </EmptyState>
    );
  }
  return (
    <>
      <ReferenceCard job={job} />
      <Card
        title={
          events.data ? `Alarms (${alarms.length}${alarms.length === 500 ? '+' : ''})` : 'Alarms'
        }
      >
        {events.isPending ? (
          <Loading label="Reading the alarms" />
        ) : events.data === undefined ? (
          <ErrorState error={events.error} onRetry={() => void events.refetch()} />
        ) : (
          <AlarmList alarms={alarms} none={unseen(job) ?? ALL_WELL} onPick={showAlarm} />
        )}
      </Card>
      <HeatCard
        job={job}
        order={order}
        tensor={tensor}
        setTensor={setTensor}
        figure={figure}
        setFigure={setFigure}
        spot={spot}
        setSpot={setSpot}
      />
      <Card title="Layers">
        {conversion.isPending ? (
          <Loading label="Reading the conversion report" />
        ) : conversion.isError ? (
          conversion.error instanceof ApiError && conversion.error.status === 404 ? (
            <EmptyState title="No conversion report">
              {job.is_final
                ? 'The job ended before its model was converted.'
                : 'It is made before the first step.'}
            </EmptyState>
          ) : (
            <ErrorState error={conversion.error} onRetry={() => void conversion.refetch()} />
          )
        ) : (
          <LayerTable job={job} rows={rows} alarms={alarms} spot={spot} onPick={setSpot} />
        )}
      </Card>
      <PrecisionCard job={job} />
    </>
  );
}

/** Why nothing was looked at, or not yet; null where figures were recorded. */
function unseen(job: Job): string | null {
  const why = unwatched(job.spec);
  if (why !== null) return why;
  const { fp8_every_steps: every = 1 } = (job.spec.telemetry ?? {}) as { fp8_every_steps?: number };
  if (job.progress.step >= every) return null;
  const when = `The first figures come with step ${every.toLocaleString('en-US')}`;
  return job.is_final ? `${when}; the job ended before it.` : `${when}.`;
}

function HeatCard(props: {
  job: Job;
  order: readonly string[];
  tensor: Tensor;
  setTensor: (tensor: Tensor) => void;
  figure: Figure;
  setFigure: (figure: Figure) => void;
  spot: Spot | null;
  setSpot: (spot: Spot | null) => void;
}) {
  const { job, tensor, figure, order } = props;
  const [cursor, setCursor] = useState<CellPlace | null>(null);
  const names = useMemo(() => [`fp8/*/${tensor}/${figure}`], [tensor, figure]);
  const curves = useCurves(job.id, names, null, 120);
  const heat = useMemo(
    () =>
      heatOf(curves.isPlaceholderData ? [] : (curves.data?.series ?? []), tensor, figure, order),
    [curves.data, curves.isPlaceholderData, tensor, figure, order],
  );
  const { log, help, label } = FIGURES[figure];
  // What is under the cursor; else what was picked, in the list of alarms above all.
  const picked = props.spot && placeOf(heat, props.spot);
  // A column may be gone: they grow wider as a job goes on.
  const under = cursor && cursor.column < heat.steps.length && cursor.row < heat.layers.length;
  const told: CellPlace | null = under
    ? cursor
    : picked?.column != null
      ? { column: picked.column, row: picked.row }
      : null;
  const format = log
    ? (value: number) => formatNumber(value, 3)
    : (value: number) => formatPercent(value);
  return (
    <Card
      title="Layers over steps"
      actions={
        <>
          <fieldset className="segmented" aria-label="Figure">
            {Object.entries(FIGURES).map(([name, each]) => (
              <button
                key={name}
                type="button"
                title={each.help}
                aria-pressed={figure === name}
                onClick={() => props.setFigure(name as Figure)}
              >
                {each.label}
              </button>
            ))}
          </fieldset>
          <fieldset className="segmented" aria-label="Tensor">
            {Object.entries(TENSORS).map(([name, text]) => (
              <button
                key={name}
                type="button"
                aria-pressed={tensor === name}
                onClick={() => props.setTensor(name as Tensor)}
              >
                {text}
              </button>
            ))}
          </fieldset>
        </>
      }
    >
      {curves.isPending || curves.isPlaceholderData ? (
        <Loading label="Reading the health of the layers" />
      ) : curves.isError ? (
        <ErrorState error={curves.error} onRetry={() => void curves.refetch()} />
      ) : heat.layers.length === 0 ? (
        <EmptyState title="Nothing recorded of this tensor">
          {unseen(job) ?? 'This recipe has no such figures of this tensor.'}
        </EmptyState>
      ) : (
        <>
          <p className="readout" role="status">
            {told
              ? readingOf(heat, told, format)
              : `${help}. ${heat.width === 1 ? 'Each column is one step' : `Each column spans ${heat.width} steps`}; red marks what was not finite.`}
          </p>
          <Suspense fallback={<Loading label="Loading the heatmap" />}>
            <Heatmap
              heat={heat}
              log={log}
              label={`${label} of ${TENSORS[tensor]} for ${heat.layers.length} layers over ${heat.steps.length} columns of steps. Arrow keys read cells, Enter picks one; the table below has the worst of each layer.`}
              spot={props.spot}
              format={format}
              onCursor={setCursor}
              onPick={props.setSpot}
            />
          </Suspense>
        </>
      )}
    </Card>
  );
}
