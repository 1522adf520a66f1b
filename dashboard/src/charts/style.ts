/** How axes, lines and bands look, in the colours of the style sheet. */

import type uPlot from 'uplot';
import type { Line } from './lines';

export type Colours = (name: string) => string;

/** Reads custom properties of the style sheet, such as `--series-1`, as they hold at an element. */
export function colourReader(element: HTMLElement): Colours {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
}

function faded(colour: string, share: number): string {
  const alpha = Math.round(share * 255)
    .toString(16)
    .padStart(2, '0');
  return `${colour}${alpha}`;
}

export function axisOf(colours: Colours, more: Partial<uPlot.Axis>): uPlot.Axis {
  const grid = colours('--chart-grid');
  return {
    stroke: colours('--chart-axis'),
    font: `11px ${colours('--font') || 'sans-serif'}`,
    grid: { stroke: grid, width: 1 },
    ticks: { stroke: grid, width: 1, size: 4 },
    ...Object.fromEntries(Object.entries(more).filter(([, value]) => value !== undefined)),
  };
}

/** uPlot's series of a line, in the order of the columns that `dataOf` makes of it. */
export function seriesOf(line: Line, colours: Colours, smoothed: boolean): uPlot.Series[] {
  const colour = colours(line.colour);
  const common: uPlot.Series = {
    label: line.label,
    points: { show: false, filter: (chart, index) => alone(chart.data[index] ?? []) },
    ...(line.dashed ? { dash: [5, 5] } : {}),
  };
  const hidden: uPlot.Series = { stroke: 'transparent', width: 0, points: { show: false } };
  return [
    {
      ...common,
      stroke: smoothed ? faded(colour, 0.3) : colour,
      width: smoothed ? 1 : line.dashed ? 1.2 : 1.6,
    },
    ...(smoothed ? [{ ...common, stroke: colour, width: 1.8 }] : []),
    ...(line.band ? [hidden, hidden] : []),
  ];
}

/** Points between two gaps, which no line leads to. */
export function alone(values: ArrayLike<number | null | undefined>): number[] {
  const found: number[] = [];
  // The last point that is there, and whether a gap, or nothing, came before it.
  let point: number | null = null;
  let apart = true;
  for (let index = 0; index < values.length; index += 1) {
    const value = values[index];
    if (value === undefined) continue;
    if (value === null) {
      if (point !== null && apart) found.push(point);
      point = null;
      apart = true;
    } else {
      if (point !== null) apart = false;
      point = index;
    }
  }
  if (point !== null && apart) found.push(point);
  return found;
}

export function bandsOf(lines: readonly Line[], colours: Colours, smoothed: boolean): uPlot.Band[] {
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
