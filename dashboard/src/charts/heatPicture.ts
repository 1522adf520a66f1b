/** A heatmap as a picture of one pixel a cell, and the ramp of its colours. */

import type { Heat } from '~/pages/job/health';

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

/** Every how many there is room for a label, where one takes `size` of a room for `count`. */
export function labelEvery(count: number, room: number, size: number): number {
  return Math.max(1, Math.ceil((count * size) / Math.max(1, room)));
}
