import { expect, test } from 'vitest';
import type { Curve } from './curves';
import { isOver } from './readout';

const curve = (...step: number[]): Curve => ({
  step,
  time: step.map((each) => 10 * each),
  tokens: step.map(() => null),
  mean: step,
  min: step,
  max: step,
  nonFinite: [],
  attempts: [],
  width: 1,
});
const line = (steps: number[], steady = false) => ({
  label: '',
  colour: '',
  steady,
  curve: curve(...steps),
});

test('a line is over where its next points should have been, one of few points never', () => {
  expect(isOver(line([1, 2, 10]), 'step', 26)).toBe(false);
  expect(isOver(line([1, 9, 10]), 'step', 13)).toBe(true);
  expect(isOver(line([1, 9, 10]), 'time', 101)).toBe(false);
  expect(isOver(line([1, 9, 10]), 'time', 130)).toBe(true);
  expect(isOver(line([1, 9, 10], true), 'step', 90)).toBe(false);
  // Nothing is known of the distance of one point's next, or of points without tokens.
  expect(isOver(line([10]), 'step', 90)).toBe(false);
  expect(isOver(line([1, 9, 10]), 'tokens', 90)).toBe(false);
});
