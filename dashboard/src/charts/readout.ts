/** What a chart says in words: the values below the cursor, and what it shows as a whole. */

import type { Format } from '~/format/numbers';
import { formatDuration, formatTime } from '~/format/times';
import { type Curve, type XAxis, xOf } from './curves';
import type { Line } from './lines';

export interface Told {
  title: string;
  lines: readonly Line[];
  axis: XAxis;
  elapsed?: boolean;
  format: Format;
}

const LONGEST = 48;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
// A name written from right to left must not carry the value beside it along.
const isolated = (text: string) => (RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text);
// Of a name that would push the values of others out of sight, the beginning and the end tell it.
const brief = (text: string) =>
  isolated(text.length > LONGEST ? `${text.slice(0, LONGEST - 12)}…${text.slice(-10)}` : text);

/** For those who cannot see the curve: where each line stands now. */
export function summary(chart: Told): string {
  const parts = chart.lines.map(
    ({ label, curve }) =>
      `${isolated(label)} ${valueAt(curve, curve.step.length - 1, chart.format)}`,
  );
  return `${chart.title} by ${chart.axis}. Newest: ${parts.join(', ')}. Arrows move the cursor, plus zooms in, Escape shows all.`;
}

/** The values at a place of the axis. */
export function readoutOf(at: number, told: Told): string {
  const axis =
    told.axis === 'time'
      ? told.elapsed
        ? formatDuration(at)
        : formatTime(at)
      : `${told.axis} ${Math.round(at).toLocaleString('en-US')}`;
  const parts = told.lines.map((line) => {
    // The point there, or the one before: curves of several metrics have points apart.
    const index = xOf(line.curve, told.axis).findLastIndex((x) => x !== null && x <= at);
    const value = isOver(line, told.axis, at) ? '–' : valueAt(line.curve, index, told.format);
    return `${brief(line.label)} ${value}`;
  });
  return `${axis} · ${parts.join(' · ')}`;
}

/** A point in words. What was not finite is said: the point before it is no value here. */
function valueAt(curve: Curve, index: number, format: Format): string {
  const mean = curve.mean[index] ?? null;
  if (curve.nonFinite[index] !== true) return format(mean);
  return mean === null ? 'not finite' : `${format(mean)}, some not finite`;
}

/**
 * Whether a line has ended before a place: what it came to is no value there. A line of few points
 * (`steady`) holds until its next. The distance of a single point from its next is not known; it is
 * taken for that from the axis's beginning.
 */
export function isOver({ curve, steady }: Line, axis: XAxis, at: number): boolean {
  const x = xOf(curve, axis);
  const last = x.at(-1) ?? null;
  const before = x.length === 1 ? 0 : (x.at(-2) ?? null);
  return !steady && before !== null && last !== null && at > last + 2 * (last - before);
}
