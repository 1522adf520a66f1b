import { useEffect, useMemo, useRef, useState } from 'react';
import uPlot from 'uplot';
import 'uplot/dist/uPlot.min.css';
import { useShownTheme } from '~/app/theme';
import { useMediaQuery } from '~/app/useMediaQuery';
import { formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration, formatTime } from '~/format/times';
import { align, type Curve, smooth, type XAxis, xOf } from './curves';

export interface Line {
  label: string;
  /** A custom property of the style sheet, such as `--series-1`. */
  colour: string;
  curve: Curve;
  dashed?: boolean;
  /** Whether the least and greatest values of each bucket are shaded. */
  band?: boolean;
  /** Whether smoothing changes it: what has no noise, or few points, stays as it is. */
  steady?: boolean;
}

/** Something at a place of the axis: where an attempt began, a checkpoint, an alarm. */
export interface Mark {
  step: number;
  kind: 'attempt' | 'checkpoint' | 'alarm';
  label: string;
}

interface Props {
  title: string;
  lines: Line[];
  axis: XAxis;
  /** Whether times are seconds since each curve's beginning, and not moments. */
  elapsed?: boolean;
  log?: boolean;
  smoothing?: number;
  marks?: Mark[];
  /** The span of the axis that is shown; null: all. */
  span?: [number, number] | null;
  onSpan?: (span: [number, number] | null) => void;
  format?: (value: number | null) => string;
  height?: number;
  /** Charts of one key share their cursor. */
  syncKey: string;
  actions?: React.ReactNode;
}

/** A chart of curves. It is drawn when it comes into view, and not before. */
export function Chart(props: Props) {
  const frame = useRef<HTMLElement>(null);
  const [seen, setSeen] = useState(false);
  const roomy = useMediaQuery('(min-width: 2400px)');
  const height = props.height ?? (roomy ? 320 : 220);
  useEffect(() => {
    const element = frame.current;
    if (!element || seen) return;
    const watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) setSeen(true);
    });
    watcher.observe(element);
    return () => watcher.disconnect();
  }, [seen]);
  return (
    <figure className="card chart" ref={frame}>
      <figcaption className="chart-head">
        <h2>{props.title}</h2>
        {props.lines.length > 1 && (
          <span className="chart-key">
            {props.lines.map(({ label, colour, dashed }) => (
              <span key={`${label}${colour}`}>
                <span
                  className={dashed ? 'stroke dashed' : 'stroke'}
                  style={{ borderColor: `var(${colour})` }}
                />
                {label}
              </span>
            ))}
          </span>
        )}
        <span className="chart-actions">{props.actions}</span>
      </figcaption>
      {seen ? <Plot {...props} height={height} /> : <div style={{ height: height + 24 }} />}
    </figure>
  );
}

function Plot(props: Props & { height: number }) {
  const place = useRef<HTMLDivElement>(null);
  const readout = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const theme = useShownTheme();
  const { lines, axis, elapsed = false, log = false, smoothing = 0, height, syncKey } = props;
  const format = props.format ?? formatNumber;

  const data = useMemo(() => dataOf(lines, axis, log, smoothing), [lines, axis, log, smoothing]);
  // What the plot's callbacks read, so that new data needs no new plot.
  const now = useRef({ ...props, format, data });
  now.current = { ...props, format, data };

  // The plot is made anew only when its shape changes; new points are set.
  const shape = JSON.stringify([
    lines.map(({ label, colour, dashed, band, steady }) => [label, colour, dashed, band, steady]),
    axis,
    elapsed,
    log,
    smoothing > 0,
    theme,
    syncKey,
  ]);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `shape` names all that matters
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const colours = colourReader(element);
    const tell = (chart: uPlot) => {
      if (readout.current) readout.current.textContent = readoutOf(chart, now.current);
    };
    const chart = new uPlot(
      {
        width: Math.max(200, element.clientWidth),
        height,
        legend: { show: false },
        padding: [10, 10, 0, 0],
        cursor: {
          y: false,
          sync: { key: syncKey, scales: ['x', null] },
          drag: { x: true, y: false, setScale: false },
          points: { size: 6 },
          bind: {
            dblclick: () => () => {
              now.current.onSpan?.(null);
              return null;
            },
          },
        },
        scales: {
          x: {
            time: axis === 'time' && !elapsed,
            range: (_, min, max) =>
              now.current.span ?? (min === max ? [min - 1, max + 1] : [min, max]),
          },
          y: log ? { distr: 3 } : { range: (_, min, max) => padded(min, max) },
        },
        axes: [
          axisOf(colours, {
            size: 30,
            space: axis === 'time' ? 90 : 50,
            values:
              axis !== 'time'
                ? (_, ticks) => ticks.map(formatCompact)
                : elapsed
                  ? (_, ticks) => ticks.map(formatDuration)
                  : (chart, ticks) => clockTicks(chart, ticks),
          }),
          axisOf(colours, {
            size: 62,
            values: (_, ticks) =>
              ticks.map((tick) => (tick === null ? '' : now.current.format(tick))),
          }),
        ],
        series: [
          {},
          ...lines.flatMap((line) => seriesOf(line, colours, smoothing > 0 && !line.steady)),
        ],
        bands: bandsOf(lines, colours, smoothing > 0),
        hooks: {
          setCursor: [tell],
          setData: [tell],
          draw: [(chart) => drawMarks(chart, now.current.marks ?? [], now.current, colours)],
          setSelect: [
            (chart) => {
              const { left, width } = chart.select;
              if (width < 6) return;
              now.current.onSpan?.([chart.posToVal(left, 'x'), chart.posToVal(left + width, 'x')]);
              chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
        },
      },
      now.current.data as uPlot.AlignedData,
      element,
    );
    plot.current = chart;
    tell(chart);
    const watcher = new ResizeObserver(() =>
      chart.setSize({ width: Math.max(200, element.clientWidth), height }),
    );
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, height]);

  // biome-ignore lint/correctness/useExhaustiveDependencies: drawn anew for another span or other marks
  useEffect(() => {
    plot.current?.setData(data as uPlot.AlignedData);
  }, [data, props.span, props.marks]);

  return (
    <>
      <div
        ref={place}
        className="plot"
        tabIndex={0}
        role="group"
        aria-label={summary(props, format)}
        onKeyDown={(event) => {
          const chart = plot.current;
          if (chart && steer(chart, event.key, now.current)) event.preventDefault();
        }}
        onFocus={() => readout.current?.setAttribute('aria-live', 'polite')}
        onBlur={() => readout.current?.setAttribute('aria-live', 'off')}
      />
      <div ref={readout} className="readout" aria-live="off" />
    </>
  );
}

/** For those who cannot see the curve: where each line stands now. */
function summary(props: Props, format: (value: number | null) => string): string {
  const parts = props.lines.map(
    ({ label, curve }) => `${label} ${format(curve.mean.at(-1) ?? null)}`,
  );
  return `${props.title} by ${props.axis}. Newest: ${parts.join(', ')}. Arrows move the cursor, plus zooms in, Escape shows all.`;
}

/** Moves the cursor (arrows, Home, End) and zooms (plus, minus, Escape); whether the key did so. */
function steer(chart: uPlot, key: string, props: Props): boolean {
  const x = chart.data[0];
  const { min, max } = chart.scales.x ?? {};
  if (x.length === 0 || min == null || max == null) return false;
  const width = chart.over.clientWidth;
  const left = chart.cursor.left ?? -1;
  const at = left < 0 ? width : left;
  const step = Math.max(1, width / 100);
  const moved = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: width }[key];
  if (moved !== undefined) {
    // The third makes the other charts follow; the types of uPlot do not know it.
    const move = chart.setCursor as (
      to: { left: number; top: number },
      fire: boolean,
      publish: boolean,
    ) => void;
    move({ left: Math.min(width, Math.max(0, moved)), top: 0 }, true, true);
    return true;
  }
  if (key === '+' || key === '=') {
    const centre = chart.posToVal(at, 'x');
    props.onSpan?.([
      Math.max(min, centre - (max - min) / 4),
      Math.min(max, centre + (max - min) / 4),
    ]);
    return true;
  }
  if (key === '-' || key === 'Escape') {
    props.onSpan?.(null);
    return true;
  }
  return false;
}

type Value = number | null;

/** Columns for each line: mean, with smoothing the smoothed mean, and with a band least and greatest. */
function dataOf(lines: readonly Line[], axis: XAxis, log: boolean, smoothing: number) {
  const drawable = (values: readonly Value[]) =>
    log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values;
  const { x, columns } = align(
    lines.map(({ curve, band, steady }) => ({
      x: xOf(curve, axis),
      columns: [
        drawable(curve.mean),
        ...(smoothing > 0 && !steady ? [drawable(smooth(curve.mean, smoothing))] : []),
        ...(band ? [drawable(curve.min), drawable(curve.max)] : []),
      ],
    })),
  );
  return [x, ...columns];
}

type Colours = (name: string) => string;

function colourReader(element: HTMLElement): Colours {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
}

function faded(colour: string, share: number): string {
  const alpha = Math.round(share * 255)
    .toString(16)
    .padStart(2, '0');
  return `${colour}${alpha}`;
}

function axisOf(colours: Colours, more: Partial<uPlot.Axis>): uPlot.Axis {
  const grid = colours('--chart-grid');
  return {
    stroke: colours('--chart-axis'),
    font: `11px ${colours('--font') || 'sans-serif'}`,
    grid: { stroke: grid, width: 1 },
    ticks: { stroke: grid, width: 1, size: 4 },
    ...Object.fromEntries(Object.entries(more).filter(([, value]) => value !== undefined)),
  };
}

function seriesOf(line: Line, colours: Colours, smoothed: boolean): uPlot.Series[] {
  const colour = colours(line.colour);
  const common: uPlot.Series = {
    label: line.label,
    spanGaps: true,
    points: { show: false },
    ...(line.dashed ? { dash: [5, 5] } : {}),
  };
  const single = line.curve.step.length < 2;
  const hidden: uPlot.Series = {
    stroke: 'transparent',
    width: 0,
    points: { show: false },
    spanGaps: true,
  };
  return [
    {
      ...common,
      stroke: smoothed ? faded(colour, 0.3) : colour,
      width: smoothed ? 1 : line.dashed ? 1.2 : 1.6,
      points: { show: single },
    },
    ...(smoothed ? [{ ...common, stroke: colour, width: 1.8 }] : []),
    ...(line.band ? [hidden, hidden] : []),
  ];
}

function bandsOf(lines: readonly Line[], colours: Colours, smoothed: boolean): uPlot.Band[] {
  const bands: uPlot.Band[] = [];
  let next = 1;
  for (const line of lines) {
    next += smoothed && !line.steady ? 2 : 1;
    if (line.band) {
      bands.push({ series: [next + 1, next], fill: faded(colours(line.colour), 0.14) });
      next += 2;
    }
  }
  return bands;
}

/** Moments in the viewer's zone, as fine as the span that is shown asks for. */
function clockTicks(chart: uPlot, ticks: readonly number[]): string[] {
  const { min, max } = chart.scales.x ?? {};
  const days = ((max ?? 0) - (min ?? 0)) / 86_400;
  const format = new Intl.DateTimeFormat(
    'en-GB',
    days > 7
      ? { day: '2-digit', month: 'short' }
      : days > 1
        ? { day: '2-digit', month: 'short', hour: '2-digit', minute: '2-digit' }
        : { hour: '2-digit', minute: '2-digit', second: days < 0.01 ? '2-digit' : undefined },
  );
  return ticks.map((tick) => format.format(new Date(tick * 1000)));
}

function padded(min: number | null, max: number | null): [number, number] {
  if (min === null || max === null || !Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  const pad = (max - min) * 0.06 || Math.abs(max) * 0.05 || 1;
  return [min >= 0 && min - pad < 0 ? 0 : min - pad, max + pad];
}

/** The values below the cursor, or the newest ones while it is elsewhere. */
function readoutOf(
  chart: uPlot,
  props: Props & { format: (value: number | null) => string },
): string {
  const x = chart.data[0];
  const index = chart.cursor.idx ?? x.length - 1;
  const at = x[index];
  if (at === undefined) return '';
  const axis =
    props.axis === 'time'
      ? props.elapsed
        ? formatDuration(at)
        : formatTime(at)
      : `${props.axis} ${Math.round(at).toLocaleString('en-US')}`;
  const smoothed = (props.smoothing ?? 0) > 0;
  let column = 1;
  const parts = props.lines.map(({ label, band, steady }) => {
    const values = chart.data[column];
    column += 1 + (smoothed && !steady ? 1 : 0) + (band ? 2 : 0);
    return `${label} ${props.format(near(values, index))}`;
  });
  return `${axis} · ${parts.join(' · ')}`;
}

/** The value there, or the nearest one before: curves of several metrics have points apart. */
function near(
  values: ArrayLike<number | null | undefined> | undefined,
  index: number,
): number | null {
  for (let place = index; values && place >= 0 && place > index - 200; place -= 1) {
    const value = values[place];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

/** The place of a step on the axis, by the first line that has points about it. */
function placeOf(step: number, props: Props): number | null {
  if (props.axis === 'step') return step;
  for (const { curve } of props.lines) {
    const x = xOf(curve, props.axis);
    const index = curve.step.findIndex((other) => other + curve.width > step);
    const value = x[index];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

function drawMarks(chart: uPlot, marks: readonly Mark[], props: Props, colours: Colours): void {
  const { ctx, bbox } = chart;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px sans-serif`;
  for (const { step, kind, label } of marks) {
    const at = placeOf(step, props);
    if (at === null) continue;
    const x = Math.round(chart.valToPos(at, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const bottom = bbox.top + bbox.height;
    if (kind === 'attempt') {
      ctx.strokeStyle = colours('--line-strong');
      ctx.fillStyle = colours('--chart-axis');
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
      ctx.fillText(label, x + 4 * ratio, bbox.top + 10 * ratio);
    } else {
      const size = 4 * ratio;
      ctx.fillStyle = colours(kind === 'alarm' ? '--bad' : '--info');
      ctx.beginPath();
      if (kind === 'alarm') ctx.arc(x, bbox.top + size, size * 0.8, 0, 2 * Math.PI);
      else {
        ctx.moveTo(x - size, bottom);
        ctx.lineTo(x + size, bottom);
        ctx.lineTo(x, bottom - size * 1.6);
      }
      ctx.fill();
    }
  }
  ctx.restore();
}
