import { describe, expect, it } from 'vitest';
import { isReference } from './reference';

const fp8 = {
  model: { source: 'config', config: { hidden_size: 32 } },
  recipe: { engine: 'te', scaling: 'delayed' },
  training: { batch_size: 8, sequence_length: 32, steps: 100 },
  resources: { gpus: 1 },
};
const bf16 = { ...fp8, recipe: { engine: 'amp', dtype: 'bf16' } };

describe('isReference', () => {
  it('takes the same training in BF16, of whatever length', () => {
    expect(isReference(fp8, bf16, 'cuda', 'cuda')).toBe(true);
    expect(
      isReference(fp8, { ...bf16, training: { ...bf16.training, steps: 9 } }, 'cuda', 'cuda'),
    ).toBe(true);
  });
  it('takes nothing that would make the ratio a lie', () => {
    expect(isReference(fp8, bf16, 'cuda', 'cpu')).toBe(false);
    expect(isReference(fp8, bf16, null, null)).toBe(false);
    expect(
      isReference(fp8, { ...bf16, recipe: { engine: 'amp', dtype: 'fp32' } }, 'cuda', 'cuda'),
    ).toBe(false);
    expect(
      isReference(fp8, { ...bf16, training: { ...bf16.training, batch_size: 4 } }, 'cuda', 'cuda'),
    ).toBe(false);
    expect(isReference(fp8, { ...bf16, model: { source: 'path' } }, 'cuda', 'cuda')).toBe(false);
    expect(isReference(fp8, { ...bf16, resources: { gpus: 2 } }, 'cuda', 'cuda')).toBe(false);
    expect(isReference(bf16, bf16, 'cuda', 'cuda')).toBe(false);
  });
});
