/** A heatmap as a picture of one pixel a cell, and the ramp of its colours. */

import type { Heat, Spot } from '~/pages/job/health';

type Rgb = readonly [red: number, green: number, blue: number];

/** `#rrggbb` as three bytes. */
export function bytesOf(colour: string): Rgb {
  const value = Number.parseInt(colour.slice(1, 7), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

/** The colour at a place from 0 to 1 of a ramp, whose colours stand at equal distances. */
export function rampAt(ramp: readonly Rgb[], place: number): Rgb {
  const at = Math.min(1, Math.max(0, place)) * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(at));
  const [from, to] = [ramp[low] ?? [0, 0, 0], ramp[low + 1] ?? [0, 0, 0]];
  const mixed = (index: 0 | 1 | 2) =>
    Math.round(from[index] + (to[index] - from[index]) * (at - low));
  return [mixed(0), mixed(1), mixed(2)];
}

/** RGBA of layers down by steps across, row after row; what has no value is clear. */
export function pixelsOf(
  heat: Heat,
  ramp: readonly Rgb[],
  notFinite: Rgb,
): Uint8ClampedArray<ArrayBuffer> {
  const width = heat.steps.length;
  const pixels = new Uint8ClampedArray(width * heat.layers.length * 4);
  const put = (column: number, row: number, [red, green, blue]: Rgb) => {
    pixels.set([red, green, blue, 255], (row * width + column) * 4);
  };
  const spread = heat.high - heat.low || 1;
  for (const [column, row, drawn] of heat.cells) {
    put(column, row, rampAt(ramp, (drawn - heat.low) / spread));
  }
  for (const [column, row] of heat.notFinite) put(column, row, notFinite);
  return pixels;
}

/** The index of the column that holds a step; the last one before it where it is between two. */
export function columnOf(steps: readonly number[], step: number): number {
  return steps.findLastIndex((first) => first <= step);
}

/** A cell by its place. */
export interface CellPlace {
  column: number;
  row: number;
}

/** Where a spot is; of one without a step, or whose step has no column, the whole row. */
export function placeOf(heat: Heat, spot: Spot): { column: number | null; row: number } | null {
  const row = heat.layers.indexOf(spot.layer);
  if (row < 0) return null;
  const column = spot.step === null ? -1 : columnOf(heat.steps, spot.step);
  return { column: column < 0 ? null : column, row };
}

/**
 * The cell that a key leads to from another: arrows to the next one, Home and End along the row,
 * Escape to none. Undefined for other keys.
 */
export function moved(
  heat: Heat,
  from: { column: number | null; row: number } | null,
  key: string,
): CellPlace | null | undefined {
  const last = { column: heat.steps.length - 1, row: heat.layers.length - 1 };
  const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  const row = from?.row ?? 0;
  // The newest step is what one looks for first.
  const column = from?.column ?? last.column;
  if (key === 'Escape') return null;
  if (key === 'Home') return { column: 0, row };
  if (key === 'End') return { column: last.column, row };
  if (by === undefined) return undefined;
  if (from === null) return { column, row };
  const within = (at: number, most: number) => Math.min(most, Math.max(0, at));
  return {
    column: within(column + (by[0] ?? 0), last.column),
    row: within(row + (by[1] ?? 0), last.row),
  };
}

/** Names for a narrow window: without the dotted parts that all begin with. */
export function shortNames(names: readonly string[]): string[] {
  const [first = '', ...others] = names;
  let shared = 0;
  for (let dot = first.indexOf('.') + 1; dot > 0; dot = first.indexOf('.', dot) + 1) {
    const start = first.slice(0, dot);
    if (!others.every((name) => name.startsWith(start))) break;
    shared = dot;
  }
  return names
    .map((name) => name.slice(shared))
    .map((n) => (n.length > 20 ? `…${n.slice(-19)}` : n));
}

/** Every how many there is room for a label, where one takes `size` of a room for `count`. */
export function labelEvery(count: number, room: number, size: number): number {
  return Math.max(1, Math.ceil((count * size) / Math.max(1, room)));
}
