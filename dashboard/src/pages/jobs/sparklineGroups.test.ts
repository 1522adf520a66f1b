import { describe, expect, it } from 'vitest';
import { ofOneLength } from './sparklineGroups';

const jobs = (...steps: number[]) => steps.map((step) => ({ progress: { step } }));

describe('ofOneLength', () => {
  it('keeps jobs of a like length with the first', () => {
    const found = ofOneLength(jobs(600, 20_000, 500, 300, 50));
    expect(found.map(({ progress }) => progress.step)).toEqual([600, 500, 300]);
  });
  it('comes to every job in the end', () => {
    let left = jobs(0, 1, 600, 20_000, 1_000_000);
    for (let round = 0; left.length > 0 && round < 5; round += 1) {
      const group = ofOneLength(left);
      expect(group.length).toBeGreaterThan(0);
      left = left.filter((job) => !group.includes(job));
    }
    expect(left).toEqual([]);
  });
  it('is empty for none', () => expect(ofOneLength([])).toEqual([]));
});
