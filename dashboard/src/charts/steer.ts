import type uPlot from 'uplot';

/** Moves the cursor (arrows, Home, End) and zooms (plus, minus, Escape); whether the key did so. */
export function steer(
  chart: uPlot,
  key: string,
  onSpan: ((span: [number, number] | null) => void) | undefined,
): boolean {
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
    onSpan?.([Math.max(min, centre - (max - min) / 4), Math.min(max, centre + (max - min) / 4)]);
    return true;
  }
  if (key === '-' || key === 'Escape') {
    onSpan?.(null);
    return true;
  }
  return false;
}
