import { describe, expect, it } from 'vitest';
import type { Schemas } from '~/api/client';
import { alarmsOf, heatOf, parseName, readingOf, watchedNames, worst } from './health';

function series(
  name: string,
  first: number[],
  max: (number | string | null)[],
  bad: number[] = [],
): Schemas['Series'] {
  const zero = first.map(() => 0);
  return {
    attempt: 1,
    job_id: 'job_1',
    name,
    width: 2,
    buckets: {
      first_step: first,
      last_step: first,
      min: max,
      max,
      mean: max,
      min_step: first,
      max_step: first,
      last: max.map((value) => value ?? 'NaN'),
      count: zero,
      non_finite: first.map((step) => (bad.includes(step) ? 1 : 0)),
      time: zero,
      tokens: zero,
    },
  };
}

describe('parseName', () => {
  it('reads from the end: a layer may hold a slash', () => {
    expect(parseName('fp8/model/layers.0/q_proj/grad_output/amax')).toEqual({
      layer: 'model/layers.0/q_proj',
      tensor: 'grad_output',
      figure: 'amax',
    });
    expect(parseName('train/loss')).toBeNull();
  });
});

describe('heatOf', () => {
  const all = [
    series('fp8/layer.10/input/amax', [0, 2], [8, 2]),
    series('fp8/layer.9/input/amax', [2], [4]),
    series('fp8/layer.9/weight/amax', [0], [1024]),
    series('fp8/layer.9/input/saturated', [0], [0.5]),
  ];
  it('gives the colours to what is not outside, and says what is beyond', () => {
    const steps = Array.from({ length: 40 }, (_, step) => step);
    const scales = steps.map((step) => (step === 0 ? 1 : 2 ** (30 + (step % 5))));
    const heat = heatOf([series('fp8/layer/input/scale', steps, scales)], 'input', 'scale');
    // Quartiles of 31 and 33: three below the first, and nothing above.
    expect([heat.low, heat.high]).toEqual([28, 34]);
    expect(heat.beyond).toEqual({ low: true, high: false });
    expect(heat.cells[0]).toEqual([0, 0, 0, 1]);
    const same = scales.map((_, step) => (step === 7 ? 4 : 2));
    const flat = heatOf([series('fp8/layer/input/scale', steps, same)], 'input', 'scale');
    expect([flat.low, flat.high, flat.beyond.high]).toEqual([1, 2, false]);
  });

  it('has a GEMM of several layers where they stand', () => {
    const layers = ['b.mlp.down', 'b.attn.o', 'b.mlp.gate_up', 'b.attn.qkv', 'other'];
    const order = ['b.attn.q', 'b.attn.k', 'b.attn.o', 'b.mlp.gate', 'b.mlp.down', 'head'];
    const given = layers.map((layer) => series(`fp8/${layer}/input/amax`, [0], [1]));
    const sorted = ['b.attn.qkv', 'b.attn.o', 'b.mlp.gate_up', 'b.mlp.down', 'other'];
    expect(heatOf(given, 'input', 'amax', order).layers).toEqual(sorted);
  });

  it('takes one figure of one tensor, on a logarithm', () => {
    const heat = heatOf(all, 'input', 'amax');
    expect(heat.layers).toEqual(['layer.9', 'layer.10']);
    expect(heat.steps).toEqual([0, 2]);
    expect(heat.cells).toEqual([
      [1, 0, 2, 4],
      [0, 1, 3, 8],
      [1, 1, 1, 2],
    ]);
    expect([heat.low, heat.high, heat.width]).toEqual([1, 3, 2]);
  });
  it("keeps the model's order", () => {
    expect(heatOf(all, 'input', 'amax', ['layer.10', 'layer.9']).layers).toEqual([
      'layer.10',
      'layer.9',
    ]);
  });
  it('shows shares from zero on', () => {
    const heat = heatOf(all, 'input', 'saturated');
    expect([heat.low, heat.high]).toEqual([0, 0.5]);
    expect(heatOf([], 'input', 'saturated').cells).toEqual([]);
  });
  it('marks what was not finite, and draws no logarithm of zero', () => {
    const heat = heatOf(
      [series('fp8/a/input/amax', [0, 2, 4], [null, 0, 1], [0])],
      'input',
      'amax',
    );
    expect(heat.notFinite).toEqual([[0, 0]]);
    expect(heat.cells).toEqual([[2, 0, 0, 1]]);
    expect(heat.low).toBeLessThan(heat.high);
  });
});

describe('readingOf', () => {
  const heat = heatOf(
    [series('fp8/a/input/amax', [0, 1200], [3, 8], [1200]), series('fp8/b/input/amax', [0], [2])],
    'input',
    'amax',
  );
  const read = (column: number, row: number) => readingOf(heat, { column, row }, String);
  it('tells layer, steps and value, and what was not finite or never recorded', () => {
    expect(read(0, 0)).toBe('a, steps 0 to 1: 3');
    expect(read(1, 0)).toBe('a, steps 1,200 to 1,201: 8, and not finite');
    expect(read(1, 1)).toBe('b, steps 1,200 to 1,201: nothing recorded');
  });
});

describe('worst', () => {
  it('finds the greatest over tensors and steps', () => {
    const found = worst(
      [
        series('fp8/a/input/saturated', [0, 2], [0.1, 0.3]),
        series('fp8/a/weight/saturated', [0], [0.2]),
      ],
      'saturated',
    );
    expect(found.get('a')).toEqual({ value: 0.3, tensor: 'input', step: 2 });
  });
});

describe('alarmsOf', () => {
  it('takes events that name a layer and a step', () => {
    const event = {
      seq: 5,
      time: '',
      attempt: 1,
      actor: 'worker',
      message: 'm',
      kind: 'fp8_alarm',
    };
    const data = { step: 7, layer: 'a', tensor: 'input', what: 'saturation' };
    expect(
      alarmsOf([
        { ...event, data },
        { ...event, kind: 'status', data },
        { ...event, data: {} },
      ]),
    ).toEqual([{ seq: 5, message: 'm', attempt: 1, ...data }]);
  });
});

describe('watchedNames', () => {
  it('has layers that are one GEMM have its figures, and no norm', () => {
    const half = 'model.layers.0.self_attn';
    const row = (name: string, from: string, group: string | null) => ({ name, from, group });
    const rows = [
      row(`${half}.q_proj`, 'Linear', half),
      row(`${half}.v_proj`, 'Linear', half),
      row(`${half}.o_proj`, 'Linear', half),
      row('model.layers.0.input_layernorm', 'LlamaRMSNorm', half),
      row('model.layers.0.mlp.up_proj', 'Linear', 'model.layers.0.mlp'),
      row('model.layers.1.mlp.up_proj', 'Linear', 'model.layers.1.mlp'),
      row('lm_head', 'Linear', null),
    ];
    const gemm = 'model.layers.0.mlp.gate_up_proj';
    const seen = new Set([`${half}.core_attention`, `${half}.qkv_proj`, `${half}.o_proj`, gemm]);
    const names = watchedNames(rows, seen);
    const changed = [...names].filter(([name, watched]) => name !== watched);
    expect(changed).toEqual([
      [`${half}.q_proj`, `${half}.qkv_proj`],
      [`${half}.v_proj`, `${half}.qkv_proj`],
      ['model.layers.0.mlp.up_proj', gemm],
    ]);
    expect(names.size).toBe(rows.length);
  });
});
