/** A chart as uPlot is told of it. */

import type uPlot from 'uplot';
import {
  type Format,
  formatBytes,
  formatCompact,
  formatNumber,
  formatTick,
} from '~/format/numbers';
import { formatDuration } from '~/format/times';
import type { XAxis } from './curves';
import type { Line, Mark } from './lines';
import { drawBroken, drawMarks } from './marks';
import { axisOf, bandsOf, type Colours, seriesOf } from './style';

const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);
// Half a step is none.
const WHOLE = Array.from({ length: 16 }, (_, power) =>
  [1, 2, 5].map((first) => Number(`${first}e${power}`)),
).flat();

/**
 * Values beside an axis, in as many digits as tell each from the next; those without a label (null,
 * on a log axis) have none.
 */
export function toldApart(ticks: readonly (number | null)[], format: Format): string[] {
  const told = ticks.filter((tick) => tick !== null);
  let digits = 3;
  while (digits < 15 && new Set(told.map((tick) => format(tick, digits))).size < told.length)
    digits += 1;
  return ticks.map((tick) => (tick === null ? '' : format(tick, digits)));
}

/** What a plot cannot change once it is made. */
export interface Shape {
  lines: readonly Line[];
  axis: XAxis;
  /** Whether times are seconds since each curve's beginning, and not moments. */
  elapsed: boolean;
  log: boolean;
  /** Whether the axis of values begins at zero: where sizes are compared. */
  zero: boolean;
  smoothed: boolean;
  width: number;
  height: number;
  /** Charts of one key share their cursor. */
  syncKey: string;
}

/** What it asks for again whenever it draws. */
export interface Current {
  lines: readonly Line[];
  axis: XAxis;
  marks?: readonly Mark[] | undefined;
  span?: [number, number] | null | undefined;
  onSpan?: ((span: [number, number] | null) => void) | undefined;
  format: Format;
}

/** `tell` is called when the cursor moved or the data changed. */
export function optionsOf(
  shape: Shape,
  current: () => Current,
  colours: Colours,
  tell: (chart: uPlot) => void,
): uPlot.Options {
  const { axis, elapsed, log, zero, smoothed } = shape;
  const { format } = current();
  return {
    width: shape.width,
    height: shape.height,
    legend: { show: false },
    padding: [10, 10, 0, 0],
    cursor: {
      y: false,
      sync: { key: shape.syncKey, scales: ['x', null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: {
        dblclick: () => () => {
          current().onSpan?.(null);
          return null;
        },
      },
    },
    scales: {
      x: {
        time: axis === 'time' && !elapsed,
        range: (_, min, max) => current().span ?? (min === max ? [min - 1, max + 1] : [min, max]),
      },
      y: log
        ? { distr: 3, range: (_, min, max) => logRange(min, max) }
        : { range: (_, min, max) => padded(min, max, zero) },
    },
    axes: [
      axisOf(colours, {
        size: 30,
        space: axis === 'time' ? 90 : 50,
        incrs: axis === 'time' ? undefined : WHOLE,
        values:
          axis !== 'time'
            ? (_, ticks) => toldApart(ticks, formatCompact)
            : elapsed
              ? (_, ticks) => ticks.map(formatDuration)
              : (chart, ticks) => clockTicks(chart, ticks),
      }),
      axisOf(colours, {
        size: 62,
        // Round bytes are powers of two.
        incrs: format === formatBytes ? BINARY : undefined,
        values: (_, ticks, _axis, _space, increment) =>
          format === formatNumber && !log
            ? ticks.map((tick) => formatTick(tick, increment))
            : toldApart(ticks, format),
      }),
    ],
    series: [
      {},
      ...shape.lines.flatMap((line) => seriesOf(line, colours, smoothed && !line.steady)),
    ],
    bands: bandsOf(shape.lines, colours, smoothed),
    hooks: {
      setCursor: [tell],
      setData: [tell],
      draw: [
        (chart) => drawBroken(chart, current(), colours),
        (chart) => drawMarks(chart, current().marks ?? [], current(), colours),
      ],
      setSelect: [
        (chart) => {
          const { left, width } = chart.select;
          if (width < 6) return;
          current().onSpan?.([chart.posToVal(left, 'x'), chart.posToVal(left + width, 'x')]);
          chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  };
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

export function padded(min: number | null, max: number | null, zero: boolean): [number, number] {
  if (min === null || max === null || !Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  if (zero && min >= 0) return [0, max * 1.08 || 1];
  const size = Math.max(Math.abs(min), Math.abs(max));
  // What differs by rounding alone is one value; uPlot would look for ticks between for ever.
  const varies = max - min > size * 1e-9;
  const pad = varies ? (max - min) * 0.06 : size * 0.05 || 1;
  return [min >= 0 && min - pad < 0 ? 0 : min - pad, max + pad];
}

/**
 * The span of a log axis: from and to multiples of a power of ten, 3 to 20 for losses from 3.1 to
 * 10.8. uPlot would go on to 100, and leave half of the chart empty.
 */
export function logRange(min: number | null, max: number | null): [number, number] {
  if (min === null || max === null || !(min > 0) || !Number.isFinite(max)) return [1, 10];
  // Not 10 ** exponent, which is a little beside small powers.
  const unit = (value: number) => Number(`1e${Math.floor(Math.log10(value))}`);
  const plain = (value: number) => Number(value.toPrecision(12));
  const low = plain(Math.floor(min / unit(min)) * unit(min));
  const high = plain(Math.ceil(max / unit(max)) * unit(max));
  return [low, high > low ? high : high + unit(max)];
}
