import { expect, test } from 'vitest';
import type { Curve } from './curves';
import { isOver, readoutOf, summary } from './readout';

const curve = (...step: number[]): Curve => ({
  step,
  time: step.map((each) => 10 * each),
  tokens: step.map(() => null),
  mean: step,
  min: step,
  max: step,
  nonFinite: step.map(() => false),
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
  // Of one point that at the first step, and of one that at every tenth.
  expect(isOver(line([1]), 'step', 80)).toBe(true);
  expect(isOver(line([10]), 'step', 25)).toBe(false);
  // Nothing is known of points without tokens.
  expect(isOver(line([1, 9, 10]), 'tokens', 90)).toBe(false);
});

test('what was not finite is said, and the value before it is not told in its place', () => {
  const norm = line([1, 2, 3, 4]);
  norm.label = 'norm';
  norm.curve.mean = [2, 1580, null, 3];
  norm.curve.nonFinite = [false, false, true, true];
  const told = { title: 'Norm', lines: [norm], axis: 'step' as const, format: String };
  expect(readoutOf(2, told)).toBe('step 2 · norm 1580');
  expect(readoutOf(3, told)).toBe('step 3 · norm not finite');
  expect(readoutOf(4, told)).toBe('step 4 · norm 3, some not finite');
  expect(summary(told)).toContain('3, some not finite');
});

test('a name of another direction stays apart from its value', () => {
  const one = { ...line([1]), label: 'تدريب' };
  const told = { title: '', lines: [one], axis: 'step' as const, format: String };
  expect(readoutOf(1, told)).toBe('step 1 · \u2068تدريب\u2069 1');
});
