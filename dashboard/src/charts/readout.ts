/** What a chart says in words: the values below the cursor, and what it shows as a whole. */

import type uPlot from 'uplot';
import { formatDuration, formatTime } from '~/format/times';
import { type XAxis, xOf } from './curves';
import type { Line } from './lines';

export interface Told {
  title: string;
  lines: readonly Line[];
  axis: XAxis;
  elapsed?: boolean;
  smoothing?: number;
  format: (value: number | null) => string;
}

/** For those who cannot see the curve: where each line stands now. */
export function summary(chart: Told): string {
  const parts = chart.lines.map(
    ({ label, curve }) => `${label} ${chart.format(curve.mean.at(-1) ?? null)}`,
  );
  return `${chart.title} by ${chart.axis}. Newest: ${parts.join(', ')}. Arrows move the cursor, plus zooms in, Escape shows all.`;
}

/** The values below the cursor, or the newest ones while it is elsewhere. */
export function readoutOf(chart: uPlot, props: Told): string {
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
  const parts = props.lines.map((line) => {
    const { label, band, steady } = line;
    const values = chart.data[column];
    column += 1 + (smoothed && !steady ? 1 : 0) + (band ? 2 : 0);
    return `${label} ${props.format(isOver(line, props.axis, at) ? null : near(values, index))}`;
  });
  return `${axis} · ${parts.join(' · ')}`;
}

/**
 * Whether a line has ended before a place: what it came to is no value there. A line of few points
 * (`steady`) holds until its next.
 */
export function isOver({ curve, steady }: Line, axis: XAxis, at: number): boolean {
  const x = xOf(curve, axis);
  const [before, last] = [x.at(-2) ?? null, x.at(-1) ?? null];
  return !steady && before !== null && last !== null && at > last + 2 * (last - before);
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
