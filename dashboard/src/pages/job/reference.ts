/** Which jobs a job can be measured against, and what the measurement says. */

import { type Json, same } from './specDefaults';

type Spec = { [name: string]: Json };

const part = (spec: Spec, name: string): Spec => (spec[name] ?? {}) as Spec;

// What speed and memory depend on, beside the recipe.
const TRAINING = [
  'batch_size',
  'sequence_length',
  'gradient_accumulation',
  'gradient_checkpointing',
  'precision',
];

/** Whether `other` trains the same in BF16: same model, device and sizes, but the engine `amp`. */
export function isReference(
  spec: Spec,
  other: Spec,
  device: string | null,
  otherDevice: string | null,
): boolean {
  const recipe = part(other, 'recipe');
  if (recipe.engine !== 'amp' || recipe.dtype !== 'bf16') return false;
  if (part(spec, 'recipe').engine === 'amp') return false;
  if (device === null || device !== otherDevice) return false;
  if (!same(spec.model, other.model) || !same(spec.adapter, other.adapter)) return false;
  if (!same(part(spec, 'resources').gpus, part(other, 'resources').gpus)) return false;
  // A learning rate costs nothing; another optimizer has other states.
  const optimizer = (of: Spec) => part(part(of, 'training'), 'optimizer').name;
  if (!same(optimizer(spec), optimizer(other))) return false;
  return TRAINING.every((name) =>
    same(part(spec, 'training')[name], part(other, 'training')[name]),
  );
}
