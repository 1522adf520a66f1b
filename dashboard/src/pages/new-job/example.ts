import type { JsonObject } from './schema';

/** A spec that every node can train in a minute: a beginning to be changed. */
export const EXAMPLE: JsonObject = {
  name: 'first-fp8-run',
  model: {
    source: 'config',
    config: {
      model_type: 'llama',
      vocab_size: 272,
      hidden_size: 64,
      intermediate_size: 176,
      num_hidden_layers: 2,
      num_attention_heads: 4,
      num_key_value_heads: 4,
      max_position_embeddings: 128,
      bos_token_id: null,
      eos_token_id: null,
    },
  },
  data: { source: 'builtin' },
  recipe: {
    engine: 'emulated',
    scaling: 'delayed',
    fp8_format: 'HYBRID',
    amax_history_len: 16,
    amax_compute_algo: 'max',
  },
  training: { steps: 200, batch_size: 4, sequence_length: 64, optimizer: { lr: 0.002 } },
};
