/** What a chart draws: lines over one axis, and marks at steps of it. */

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

type Value = number | null;

/** At how many points a line's values were not finite. */
export const brokenPoints = ({ curve }: Line): number => curve.nonFinite.filter(Boolean).length;

/** Columns for each line: mean, with smoothing the smoothed mean, and with a band least and greatest. */
export function dataOf(lines: readonly Line[], axis: XAxis, log: boolean, smoothing: number) {
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
