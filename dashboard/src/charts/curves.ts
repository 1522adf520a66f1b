/** Curves made of the buckets that the service sends: joined over attempts, smoothed, on one axis. */

import type { Schemas } from '~/api/client';
import { numberOf } from '~/format/numbers';

export type XAxis = 'step' | 'time' | 'tokens';
type Value = number | null;

/** One metric of one job over all its attempts, in the order of steps. */
export interface Curve {
  step: number[];
  time: Value[];
  tokens: Value[];
  mean: Value[];
  min: Value[];
  max: Value[];
  /** Whether the bucket holds values that were not finite; its mean is null where all were so. */
  nonFinite: boolean[];
  /** Where each attempt's part begins. */
  attempts: { attempt: number; step: number }[];
  /** Steps of a bucket; 1 is every step as it was. */
  width: number;
}

const finite = (value: number | string | null | undefined): Value => {
  const number = numberOf(value);
  return Number.isFinite(number) ? number : null;
};

/** The curve of a metric from the series of an answer; null where it has none. */
export function curveOf(
  series: readonly Schemas['Series'][],
  name: string,
  jobId?: string,
): Curve | null {
  const parts = series
    .filter((each) => each.name === name && (jobId === undefined || each.job_id === jobId))
    .filter((each) => (each.buckets?.first_step.length ?? 0) > 0)
    .sort((one, other) => one.attempt - other.attempt);
  if (parts.length === 0) return null;
  const curve: Curve = {
    step: [],
    time: [],
    tokens: [],
    mean: [],
    min: [],
    max: [],
    nonFinite: [],
    attempts: [],
    width: 1,
  };
  const { step, time, tokens, mean, min, max, nonFinite } = curve;
  const columns = [step, time, tokens, mean, min, max, nonFinite];
  for (const part of parts) {
    const buckets = part.buckets;
    if (!buckets) continue;
    curve.width = Math.max(curve.width, part.width ?? 1);
    curve.attempts.push({ attempt: part.attempt, step: buckets.first_step[0] ?? 0 });
    // At the border of two attempts both can have a bucket of the same edge; the newer one stands.
    const begin = buckets.first_step[0] ?? 0;
    while (curve.step.length > 0 && (curve.step.at(-1) ?? 0) >= begin) {
      for (const column of columns) column.pop();
    }
    buckets.first_step.forEach((first, index) => {
      curve.step.push(first);
      curve.time.push(buckets.time[index] ?? null);
      curve.tokens.push(buckets.tokens[index] ?? null);
      curve.mean.push(finite(buckets.mean[index]));
      curve.min.push(finite(buckets.min[index]));
      curve.max.push(finite(buckets.max[index]));
      curve.nonFinite.push((buckets.non_finite[index] ?? 0) > 0);
    });
  }
  return curve;
}

/**
 * Exponential moving average, corrected for its beginning (Kingma and Ba 2015, section 3), so that
 * the first values are not pulled towards zero. `weight` in [0, 1): 0 changes nothing.
 */
export function smooth(values: readonly Value[], weight: number): Value[] {
  let sum = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

/** Where a curve's points lie on the axis; null where that was not told. */
export function xOf(curve: Curve, axis: XAxis): Value[] {
  return axis === 'step' ? curve.step : axis === 'time' ? curve.time : curve.tokens;
}

function isRising(values: readonly Value[]): values is readonly number[] {
  let before = Number.NEGATIVE_INFINITY;
  for (const value of values) {
    if (value === null || value <= before) return false;
    before = value;
  }
  return true;
}

/**
 * Columns of several curves over one rising axis: undefined where a curve has no point, which a line
 * passes over, and null where its point has no value, which is a gap.
 */
export function align(
  parts: readonly { x: readonly Value[]; columns: readonly (readonly Value[])[] }[],
): { x: readonly number[]; columns: (readonly (Value | undefined)[])[] } {
  const [only] = parts;
  if (parts.length === 1 && only && isRising(only.x))
    return { x: only.x, columns: [...only.columns] };
  const places = new Set<number>();
  for (const { x } of parts) for (const value of x) if (value !== null) places.add(value);
  const axis = [...places].sort((one, other) => one - other);
  const index = new Map(axis.map((value, place) => [value, place]));
  const columns: (Value | undefined)[][] = [];
  for (const { x, columns: own } of parts) {
    for (const column of own) {
      const row = new Array<Value | undefined>(axis.length).fill(undefined);
      column.forEach((value, place) => {
        const at = x[place];
        const target = at === null || at === undefined ? undefined : index.get(at);
        if (target !== undefined) row[target] = value;
      });
      columns.push(row);
    }
  }
  return { x: axis, columns };
}

/** The steps that a span of the axis covers, widened to whole buckets; null where it has none. */
export function stepsOf(
  curve: Curve,
  axis: XAxis,
  from: number,
  to: number,
): [number, number] | null {
  const x = xOf(curve, axis);
  let first: number | null = null;
  let last: number | null = null;
  x.forEach((value, index) => {
    const step = curve.step[index];
    if (value === null || step === undefined || value < from || value > to) return;
    first = first === null ? step : Math.min(first, step);
    last = last === null ? step : Math.max(last, step);
  });
  if (first === null || last === null) return null;
  return [first, last + curve.width - 1];
}

/** From the first to the last point of all curves; null where they are not two. */
export function spanOf(curves: readonly Curve[], axis: XAxis): [number, number] | null {
  let first = Number.POSITIVE_INFINITY;
  let last = Number.NEGATIVE_INFINITY;
  for (const curve of curves) {
    for (const value of xOf(curve, axis)) {
      if (value === null) continue;
      first = Math.min(first, value);
      last = Math.max(last, value);
    }
  }
  return first < last ? [first, last] : null;
}

/** The newest finite mean of a curve. */
export function newest(curve: Curve | null): Value {
  if (curve === null) return null;
  for (let index = curve.mean.length - 1; index >= 0; index -= 1) {
    const value = curve.mean[index];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

/** The middle one of the finite values; null without any. */
export function median(values: readonly Value[]): Value {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  if (sorted.length === 0) return null;
  const half = sorted.length >> 1;
  const high = sorted[half] ?? null;
  if (sorted.length % 2 === 1 || high === null) return high;
  return ((sorted[half - 1] ?? high) + high) / 2;
}
