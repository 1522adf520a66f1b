import { describe, expect, it } from 'vitest';
import document from '../../../../tests/api/openapi.json';
import {
  branchOf,
  controlOf,
  isObject,
  type JsonObject,
  labelOf,
  pointerOf,
  resolve,
  type Schema,
  valueAt,
  withFragment,
  withoutDefaults,
  withoutNull,
  withValue,
} from './schema';

const root = JSON.parse(
  JSON.stringify({ $ref: '#/$defs/JobSpec', $defs: document.components.schemas }).replaceAll(
    '#/components/schemas/',
    '#/$defs/',
  ),
) as Schema;
const spec = resolve(root, root);

function property(...names: string[]): Schema {
  let schema = spec;
  for (const name of names) {
    const inner = schema.properties?.[name];
    if (inner === undefined) throw new Error(`no ${name}`);
    schema = withoutNull(resolve(inner, root), root)[0];
  }
  return schema;
}

describe('controls', () => {
  it('follow the schema of the service', () => {
    const kinds = (...names: string[]) =>
      controlOf(names.at(-1) ?? '', property(...names), root).kind;
    expect(kinds('training')).toBe('object');
    expect(kinds('training', 'steps')).toBe('number');
    expect(kinds('training', 'gradient_checkpointing')).toBe('boolean');
    expect(kinds('training', 'max_grad_norm')).toBe('number');
    expect(kinds('training', 'early_stopping')).toBe('object');
    expect(kinds('training', 'schedule')).toBe('union');
    expect(kinds('conversion', 'skip')).toBe('list');
    expect(kinds('task')).toBe('enum');
    expect(kinds('labels')).toBe('map');
    expect(kinds('name')).toBe('text');
  });

  it('there is one for every part of every branch', () => {
    let seen = 0;
    function walk(schema: Schema) {
      const control = controlOf('', schema, root);
      seen += 1;
      if (control.kind === 'union') for (const branch of control.branches) walk(branch.schema);
      if (control.kind !== 'object') return;
      for (const [name, inner] of Object.entries(control.schema.properties ?? {})) {
        expect(labelOf(name, resolve(inner, root))).not.toMatch(/^Spec[A-Z]|_/);
        walk(withoutNull(resolve(inner, root), root)[0]);
      }
    }
    walk(root);
    expect(seen).toBeGreaterThan(200);
  });

  it('find the branch of a union within a union', () => {
    const recipe = controlOf('recipe', property('recipe'), root);
    if (recipe.kind !== 'union') throw new Error('no union');
    const te = branchOf(recipe, { engine: 'te', scaling: 'mxfp8' });
    expect(te?.value).toBe('te');
    const scaling = controlOf('te', te?.schema ?? {}, root);
    if (scaling.kind !== 'union') throw new Error('no union');
    expect(branchOf(scaling, { engine: 'te', scaling: 'mxfp8' })?.value).toBe('mxfp8');
    expect(branchOf(scaling, { engine: 'te' })?.value).toBe('delayed');
    expect(branchOf(scaling, { scaling: 'other' })).toBeUndefined();
  });
});

describe('values', () => {
  it('are set and taken away by path', () => {
    const one = withValue({}, ['training', 'optimizer', 'lr'], 0.1);
    expect(one).toEqual({ training: { optimizer: { lr: 0.1 } } });
    expect(valueAt(one, ['training', 'optimizer', 'lr'])).toBe(0.1);
    expect(withValue(one, ['training', 'optimizer', 'lr'], undefined)).toEqual({});
    const two = withValue({ ...one, name: 'x' }, ['training', 'steps'], 5);
    expect(two).toEqual({ training: { optimizer: { lr: 0.1 }, steps: 5 }, name: 'x' });
    expect(one).toEqual({ training: { optimizer: { lr: 0.1 } } });
    expect(withValue({ a: { b: null } }, ['a', 'b'], null)).toEqual({ a: { b: null } });
  });

  it('have pointers as problems name them', () => {
    expect(pointerOf(['labels', 'team/a~b'])).toBe('/labels/team~1a~0b');
    expect(pointerOf([])).toBe('');
  });
});

describe('an object that takes any member', () => {
  it('is written as JSON, whatever members are described', () => {
    const config = root.$defs?.SpecConfigModel?.properties?.config as Schema;
    expect(Object.keys(config.properties ?? {})).toContain('hidden_size');
    expect(controlOf('config', config, root).kind).toBe('json');
    expect(controlOf('training', root.$defs?.SpecTraining as Schema, root).kind).toBe('object');
  });
});

describe('presets', () => {
  it('replace each other whole', () => {
    const mine: JsonObject = {
      recipe: { engine: 'te', margin: 2 },
      conversion: { skip: ['lm_head'] },
      training: { steps: 10, precision: 'throughput' },
    };
    const cautious = withFragment(mine, {
      recipe: { engine: 'te', amax_history_len: 1024 },
      conversion: { keep_first_last: true },
    });
    expect(cautious).toEqual({
      recipe: { engine: 'te', amax_history_len: 1024 },
      conversion: { keep_first_last: true },
      training: { steps: 10 },
    });
    expect(withFragment(cautious, { recipe: { engine: 'amp' } })).toEqual({
      recipe: { engine: 'amp' },
      training: { steps: 10 },
    });
  });
});

describe('a full spec', () => {
  it('comes down to what was set', () => {
    const full: JsonObject = {
      name: 'x',
      spec_version: 1,
      notes: '',
      labels: {},
      task: 'causal_lm',
      adapter: null,
      model: { source: 'huggingface', id: 'a/b', revision: null },
      data: {
        source: 'builtin',
        name: 'python_topics',
        packing: false,
        shuffle: true,
        epochs: null,
      },
      recipe: { engine: 'te', scaling: 'delayed', margin: 0, amax_history_len: 16 },
      training: { steps: 5, batch_size: 8, schedule: { name: 'cosine', warmup_steps: 0 } },
      conversion: { skip: [], linear: true },
    };
    const kept = withoutDefaults(full, root, root);
    expect(kept).toEqual({
      name: 'x',
      model: { source: 'huggingface', id: 'a/b' },
      data: { source: 'builtin', packing: false },
      recipe: { engine: 'te', scaling: 'delayed', amax_history_len: 16 },
      training: { steps: 5, schedule: { name: 'cosine' } },
    });
    expect(isObject(kept)).toBe(true);
  });
});
