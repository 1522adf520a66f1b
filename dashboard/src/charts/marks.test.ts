import { expect, test } from 'vitest';
import type { Curve } from './curves';
import type { Line } from './lines';
import { placeOf } from './marks';

const line = (width: number, ...step: number[]): Line => {
  const curve: Curve = {
    step,
    time: step.map((each) => 1000 + each),
    tokens: step.map((each) => 8 * each),
    mean: step,
    min: step,
    max: step,
    nonFinite: [],
    attempts: [],
    width,
  };
  return { label: '', colour: '', curve };
};

test('a mark stands at its step; at the newest point when that holds its step', () => {
  const lines = [line(1, 40), line(50, 1, 51, 101)];
  expect(placeOf(60, { lines, axis: 'step' })).toBe(60);
  expect(placeOf(150, { lines, axis: 'step' })).toBe(101);
  // Beyond what is drawn, it has no place yet.
  expect(placeOf(151, { lines, axis: 'step' })).toBe(151);
});

test('on other axes a mark stands at the point that holds its step', () => {
  const lines = [line(50, 1, 51, 101)];
  expect(placeOf(60, { lines, axis: 'tokens' })).toBe(8 * 51);
  expect(placeOf(150, { lines, axis: 'time' })).toBe(1101);
  expect(placeOf(151, { lines, axis: 'time' })).toBeNull();
});
