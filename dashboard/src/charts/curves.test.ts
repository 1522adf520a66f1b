import { describe, expect, it } from 'vitest';
import type { Schemas } from '~/api/client';
import { align, type Curve, curveOf, median, newest, smooth, spanOf, stepsOf } from './curves';
import { sparklinePath } from './sparkline';

function series(
  attempt: number,
  first: number[],
  mean: (number | string | null)[],
  width = 1,
): Schemas['Series'] {
  const none = first.map(() => null);
  return {
    attempt,
    job_id: 'job_1',
    name: 'train/loss',
    width,
    buckets: {
      first_step: first,
      last_step: first.map((step) => step + width - 1),
      min: mean,
      max: mean,
      mean,
      min_step: none,
      max_step: none,
      last: mean.map((value) => value ?? 'NaN'),
      count: first.map(() => width),
      non_finite: mean.map((value) => (value === null ? 1 : 0)),
      time: first.map((step) => 1000 + step),
      tokens: first.map((step) => step * 64),
    },
  };
}

describe('curveOf', () => {
  it('joins attempts in order, and gives a shared edge to the newer one', () => {
    const curve = curveOf(
      [series(2, [8, 12], [3, 4], 4), series(1, [0, 4, 8], [1, 2, 9], 4)],
      'train/loss',
    );
    expect(curve?.step).toEqual([0, 4, 8, 12]);
    expect(curve?.mean).toEqual([1, 2, 3, 4]);
    expect(curve?.attempts).toEqual([
      { attempt: 1, step: 0 },
      { attempt: 2, step: 8 },
    ]);
    expect(curve?.width).toBe(4);
  });
  it('leaves gaps for what is not finite, and remembers where', () => {
    const curve = curveOf([series(1, [1, 2, 3], [1, null, 'Infinity'])], 'train/loss');
    expect(curve?.mean).toEqual([1, null, null]);
    expect(curve?.nonFinite).toEqual([false, true, false]);
    expect(newest(curve)).toBe(1);
  });
  it('forgets what was not finite with the points that a newer attempt replaces', () => {
    const curve = curveOf([series(1, [1, 2, 3], [1, 2, null]), series(2, [3], [4])], 'train/loss');
    expect([curve?.mean, curve?.nonFinite]).toEqual([
      [1, 2, 4],
      [false, false, false],
    ]);
  });
  it('is null for a metric that is not there', () => {
    expect(curveOf([series(1, [1], [1])], 'eval/loss')).toBeNull();
    expect(curveOf([series(1, [], [])], 'train/loss')).toBeNull();
    expect(curveOf([series(1, [1], [1])], 'train/loss', 'job_2')).toBeNull();
  });
});

describe('smooth', () => {
  it('changes nothing with weight 0', () => expect(smooth([1, 5, 2], 0)).toEqual([1, 5, 2]));
  it('keeps a constant a constant from the first value on', () => {
    for (const value of smooth([4, 4, 4, 4], 0.9)) expect(value).toBeCloseTo(4, 12);
  });
  it('is the average of the past with falling weights', () => {
    // By hand: (0.5 * 2 + 1 * 4) / (0.5 + 1) for weight 0.5.
    expect(smooth([2, 4], 0.5)[1]).toBeCloseTo(5 / 1.5, 12);
  });
  it('passes over gaps', () => {
    const [first, gap, last] = smooth([2, null, 4], 0.5);
    expect([first, gap]).toEqual([2, null]);
    expect(last).toBeCloseTo(5 / 1.5, 12);
  });
});

describe('align', () => {
  it('lays columns over one rising axis', () => {
    const { x, columns } = align([
      { x: [1, 3], columns: [[10, 30]] },
      {
        x: [2, 3, null],
        columns: [
          [20, 31, 99],
          [null, 7, 99],
        ],
      },
    ]);
    expect(x).toEqual([1, 2, 3]);
    expect(columns).toEqual([
      [10, undefined, 30],
      [undefined, 20, 31],
      [undefined, null, 7],
    ]);
  });
});

describe('stepsOf', () => {
  const curve: Curve = {
    step: [0, 4, 8],
    time: [100, 104, null],
    tokens: [0, 256, 512],
    mean: [1, 1, 1],
    min: [],
    max: [],
    nonFinite: [],
    attempts: [],
    width: 4,
  };
  it('widens to whole buckets', () => expect(stepsOf(curve, 'step', 3, 9)).toEqual([4, 11]));
  it('goes from times and tokens to steps', () => {
    expect(stepsOf(curve, 'time', 99, 104)).toEqual([0, 7]);
    expect(stepsOf(curve, 'tokens', 300, 600)).toEqual([8, 11]);
  });
  it('is null where there is nothing', () => expect(stepsOf(curve, 'step', 5, 7)).toBeNull());
});

describe('spanOf', () => {
  it('spans all curves, and is null where there is nothing to span', () => {
    const one = curveOf([series(1, [2, 9], [1, 1])], 'train/loss') as Curve;
    const two = curveOf([series(1, [5], [1])], 'train/loss') as Curve;
    expect(spanOf([two, one], 'step')).toEqual([2, 9]);
    expect(spanOf([one], 'time')).toEqual([1002, 1009]);
    expect(spanOf([two], 'step')).toBeNull();
    expect(spanOf([], 'tokens')).toBeNull();
  });
});

describe('median', () => {
  it('takes the middle of finite values', () => {
    expect(median([3, null, 1, 2])).toBe(2);
    expect(median([4, 1])).toBe(2.5);
    expect(median([null])).toBeNull();
  });
});

describe('sparklinePath', () => {
  it('puts the least at the bottom and the greatest at the top', () => {
    expect(sparklinePath([1, 3, 2], 104, 24)).toBe('M2.0 22.0L52.0 2.0L102.0 12.0');
  });
  it('is broken where a value is not finite', () => {
    const path = sparklinePath([1, Number.NaN, 3, 1], 104, 24);
    expect(path).toBe('M2.0 22.0M68.7 2.0L102.0 22.0');
  });
  it('draws nothing of fewer than two values', () => {
    expect(sparklinePath([1], 100, 20)).toBe('');
    expect(sparklinePath([1, Number.NaN], 100, 20)).toBe('');
  });
});
