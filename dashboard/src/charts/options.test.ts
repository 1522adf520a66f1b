import { describe, expect, it } from 'vitest';
import { formatCompact, formatPercent } from '~/format/numbers';
import { logRange, padded, toldApart } from './options';

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

describe('the axis of values', () => {
  it('sizes stand on zero, other curves have room around them', () => {
    expect(padded(400, 500, true)).toEqual([0, 540]);
    expect(padded(-1, 1, true)[0]).toBeLessThan(-1);
    expect(padded(400, 500, false)).toEqual([394, 506]);
    // A little above zero is no reason to begin elsewhere.
    expect(padded(1, 100, false)[0]).toBe(0);
    expect(padded(0, 0, true)).toEqual([0, 1]);
    expect(padded(0, 0, false)).toEqual([0, 1]);
    // A mean of ones may be a little beside one.
    const [low, high] = padded(1, 1 + Number.EPSILON, false);
    expect([low, high]).toEqual([expect.closeTo(0.95), expect.closeTo(1.05)]);
  });
});

describe('what stands beside an axis', () => {
  it('has as many digits as tell each value from the next', () => {
    expect(toldApart([100_010, 100_020], formatCompact)).toEqual(['100.01k', '100.02k']);
    expect(toldApart([1000, 1500], formatCompact)).toEqual(['1k', '1.5k']);
    expect(toldApart([0.98765, 0.98766], formatPercent)).toEqual(['98.765 %', '98.766 %']);
  });
  it('has none where a log axis has no label', () => {
    expect(toldApart([1, null, 10], formatCompact)).toEqual(['1', '', '10']);
  });
  it('ends, also where two are the same', () => {
    expect(toldApart([5, 5], formatCompact)).toEqual(['5', '5']);
  });
});
