import type uPlot from 'uplot';
import { type XAxis, xOf } from './curves';
import type { Line, Mark } from './lines';
import type { Colours } from './style';

/** The place of a step on the axis, by the first line that has points about it. */
export function placeOf(
  step: number,
  chart: { lines: readonly Line[]; axis: XAxis },
): number | null {
  if (chart.axis === 'step') {
    // The newest points stand at the first of their steps, and the axis ends there.
    const ends = chart.lines.map(({ curve }) => [curve.step.at(-1) ?? 0, curve.width] as const);
    const last = Math.max(...ends.map(([end]) => end));
    const within = ends.some(([end, width]) => end === last && step < last + width);
    return step > last && within ? last : step;
  }
  for (const { curve } of chart.lines) {
    const x = xOf(curve, chart.axis);
    const index = curve.step.findIndex((other) => other + curve.width > step);
    const value = x[index];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

/** Draws a line down where values were not finite, over a plot that has just been drawn. */
export function drawBroken(
  chart: uPlot,
  of: { lines: readonly Line[]; axis: XAxis },
  colours: Colours,
): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = colours('--bad');
  ctx.globalAlpha = 0.45;
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  for (const { curve } of of.lines) {
    const x = xOf(curve, of.axis);
    let before = Number.NaN;
    curve.nonFinite.forEach((broken, index) => {
      const value = broken ? x[index] : null;
      if (value === null || value === undefined) return;
      const at = Math.round(chart.valToPos(value, 'x', true)) + 0.5;
      if (at === before || at < bbox.left || at > bbox.left + bbox.width + 1) return;
      before = at;
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
    });
  }
  ctx.stroke();
  ctx.restore();
}

/** Draws the marks over a plot that has just been drawn. */
export function drawMarks(
  chart: uPlot,
  marks: readonly Mark[],
  of: { lines: readonly Line[]; axis: XAxis },
  colours: Colours,
): void {
  const { ctx, bbox } = chart;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px sans-serif`;
  for (const { step, kind, label } of marks) {
    const at = placeOf(step, of);
    if (at === null) continue;
    const x = Math.round(chart.valToPos(at, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const bottom = bbox.top + bbox.height;
    if (kind === 'attempt') {
      ctx.strokeStyle = colours('--line-strong');
      ctx.fillStyle = colours('--chart-axis');
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      // What was drawn before leaves a width of its own; half a pixel fills one column, not two.
      ctx.lineWidth = ratio;
      ctx.moveTo(x + 0.5, bbox.top);
      ctx.lineTo(x + 0.5, bottom);
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
