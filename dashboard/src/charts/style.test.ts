import { expect, test } from 'vitest';
import { alone } from './style';

test('points between gaps stand alone, those of which a line is made do not', () => {
  expect(alone([null, 1, null, 2, 3, null, 4])).toEqual([1, 6]);
  // Where another curve has a point, this one has no gap.
  expect(alone([1, undefined, 2, null, undefined, 3, undefined])).toEqual([5]);
  expect(alone([7])).toEqual([0]);
  expect(alone([1, 2])).toEqual([]);
  expect(alone([undefined, null])).toEqual([]);
});
