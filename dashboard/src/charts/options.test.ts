import { describe, expect, it } from 'vitest';
import { logRange } from './options';

describe('logRange', () => {
  it('goes to the next multiples of a power of ten, and no further', () => {
    expect(logRange(3.1, 10.8)).toEqual([3, 20]);
    expect(logRange(5.75, 6.99)).toEqual([5, 7]);
    expect(logRange(1.5, 150)).toEqual([1, 200]);
    expect(logRange(0.00025, 0.4)).toEqual([0.0002, 0.4]);
  });
  it('is never empty', () => {
    expect(logRange(5, 5)).toEqual([5, 6]);
    expect(logRange(1, 1)).toEqual([1, 2]);
    expect(logRange(null, null)).toEqual([1, 10]);
  });
});
