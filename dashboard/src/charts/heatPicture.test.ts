import { describe, expect, it } from 'vitest';
import {
  bytesOf,
  columnOf,
  labelEvery,
  moved,
  pixelsOf,
  placeOf,
  rampAt,
  shortNames,
} from './heatPicture';

const RAMP = ['#000000', '#204060', '#ffffff'].map(bytesOf);

describe('rampAt', () => {
  it('goes through its colours at equal distances, and not beyond its ends', () => {
    expect(rampAt(RAMP, 0)).toEqual([0, 0, 0]);
    expect(rampAt(RAMP, 0.25)).toEqual([16, 32, 48]);
    expect(rampAt(RAMP, 0.5)).toEqual([32, 64, 96]);
    expect(rampAt(RAMP, 1)).toEqual([255, 255, 255]);
    expect(rampAt(RAMP, -1)).toEqual([0, 0, 0]);
    expect(rampAt(RAMP, 7)).toEqual([255, 255, 255]);
  });
});

describe('pixelsOf', () => {
  it('puts each cell at its place, marks what was not finite, and leaves the rest clear', () => {
    const pixels = pixelsOf(
      {
        layers: ['a', 'b'],
        steps: [0, 10, 20],
        width: 10,
        cells: [
          [0, 0, 1, 2],
          [2, 1, 3, 8],
        ],
        notFinite: [[1, 1]],
        low: 1,
        high: 3,
        beyond: { low: false, high: false },
      },
      RAMP,
      [255, 0, 0],
    );
    const at = (column: number, row: number) => [
      ...pixels.slice((row * 3 + column) * 4, (row * 3 + column) * 4 + 4),
    ];
    expect(at(0, 0)).toEqual([0, 0, 0, 255]);
    expect(at(2, 1)).toEqual([255, 255, 255, 255]);
    expect(at(1, 1)).toEqual([255, 0, 0, 255]);
    expect(at(1, 0)).toEqual([0, 0, 0, 0]);
  });
});

describe('columnOf', () => {
  it('is the column that holds the step', () => {
    expect([0, 9, 10, 25].map((step) => columnOf([0, 10, 20], step))).toEqual([0, 0, 1, 2]);
    expect(columnOf([5], 4)).toBe(-1);
  });
});

const heat = {
  layers: ['a', 'b', 'c'],
  steps: [0, 10, 20],
  width: 10,
  cells: [],
  notFinite: [],
  low: 0,
  high: 1,
  beyond: { low: false, high: false },
};

describe('placeOf', () => {
  it('is the cell of a step, the row without one, and nothing of another layer', () => {
    expect(placeOf(heat, { layer: 'b', step: 15 })).toEqual({ column: 1, row: 1 });
    expect(placeOf(heat, { layer: 'b', step: null })).toEqual({ column: null, row: 1 });
    expect(placeOf(heat, { layer: 'z', step: 15 })).toBeNull();
  });
});

describe('moved', () => {
  it('begins at the newest step, goes cell by cell, and stays within', () => {
    const first = moved(heat, null, 'ArrowDown');
    expect(first).toEqual({ column: 2, row: 0 });
    expect(moved(heat, { column: 2, row: 0 }, 'ArrowDown')).toEqual({ column: 2, row: 1 });
    expect(moved(heat, { column: 2, row: 2 }, 'ArrowDown')).toEqual({ column: 2, row: 2 });
    expect(moved(heat, { column: 0, row: 1 }, 'ArrowLeft')).toEqual({ column: 0, row: 1 });
    expect(moved(heat, { column: 1, row: 1 }, 'Home')).toEqual({ column: 0, row: 1 });
    expect(moved(heat, { column: 1, row: 1 }, 'End')).toEqual({ column: 2, row: 1 });
    expect(moved(heat, { column: null, row: 1 }, 'ArrowLeft')).toEqual({ column: 1, row: 1 });
    expect(moved(heat, { column: 1, row: 1 }, 'Escape')).toBeNull();
    expect(moved(heat, { column: 1, row: 1 }, 'Tab')).toBeUndefined();
  });
});

describe('shortNames', () => {
  it('leaves out what all begin with, and keeps what tells them apart', () => {
    const names = ['model.layers.0.q_proj', 'model.layers.1.q_proj'];
    expect(shortNames(names)).toEqual(['0.q_proj', '1.q_proj']);
    expect(shortNames(['a.very.long.name.of.a.layer', 'b'])[0]).toMatch(/^….{19}$/);
    expect(shortNames([])).toEqual([]);
  });
});

describe('labelEvery', () => {
  it('leaves out labels that have no room', () => {
    expect(labelEvery(10, 140, 14)).toBe(1);
    expect(labelEvery(100, 140, 14)).toBe(10);
    expect(labelEvery(3, 0, 14)).toBe(42);
  });
});
