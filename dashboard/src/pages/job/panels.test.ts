import { describe, expect, it } from 'vitest';
import type { Schemas } from '~/api/client';
import { NAMES, panelsOf } from './panels';

function series(name: string, attempt = 1, width = 1): Schemas['Series'] {
  const steps = [attempt * 10, attempt * 10 + width];
  const values = steps.map((step) => step / 2);
  return {
    attempt,
    job_id: 'job_1',
    name,
    width,
    buckets: {
      first_step: steps,
      last_step: steps,
      min: values,
      max: values,
      mean: values,
      min_step: steps,
      max_step: steps,
      last: values,
      count: steps.map(() => width),
      non_finite: steps.map(() => 0),
      time: steps,
      tokens: steps,
    },
  };
}

describe('panelsOf', () => {
  it('has the usual charts in their order, then those that were asked for', () => {
    const panels = panelsOf(
      [series('probe/norm'), series('perf/tokens_per_second'), series('train/loss')],
      ['probe/norm', 'probe/absent'],
    );
    expect(panels.map(({ title }) => title)).toEqual([
      'Loss',
      'Throughput, tokens/s',
      'probe/norm',
    ]);
    expect(NAMES).toContain('train/loss');
    expect(NAMES).not.toContain('probe/norm');
  });

  it('joins metrics of one chart and attempts of one metric', () => {
    const [loss] = panelsOf(
      [series('train/loss', 2, 4), series('train/loss', 1, 4), series('eval/loss')],
      [],
    );
    expect(loss?.lines.map(({ label }) => label)).toEqual(['training', 'evaluation']);
    expect(loss?.lines[0]?.curve.step).toEqual([10, 14, 20, 24]);
    // Evaluation is not smoothed; the band is that of the first line where it has buckets.
    expect(loss?.lines.map(({ steady }) => steady ?? false)).toEqual([false, true]);
    expect(loss?.lines.map(({ band }) => band)).toEqual([true, false]);
  });
});
