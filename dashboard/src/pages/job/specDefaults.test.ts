import { describe, expect, it } from 'vitest';
import schema from '~/api/generated/spec-schema.json';
import { copyOf, fieldsOf, type Json, mergePatch, originOf, same } from './specDefaults';

const small = {
  $ref: '#/$defs/Job',
  $defs: {
    Job: {
      type: 'object',
      properties: {
        name: { anyOf: [{ type: 'string' }, { type: 'null' }], default: null },
        recipe: {
          oneOf: [{ $ref: '#/$defs/A' }, { $ref: '#/$defs/B' }],
          discriminator: { propertyName: 'engine', mapping: { a: '#/$defs/A', b: '#/$defs/B' } },
        },
        parity: { anyOf: [{ $ref: '#/$defs/Parity' }, { type: 'null' }], default: null },
        labels: { type: 'object', additionalProperties: { type: 'string' } },
      },
    },
    A: {
      type: 'object',
      properties: {
        engine: { const: 'a', type: 'string' },
        margin: { type: 'integer', default: 0 },
      },
    },
    B: {
      type: 'object',
      properties: {
        engine: { const: 'b', type: 'string' },
        margin: { type: 'integer', default: 4 },
      },
    },
    Parity: {
      type: 'object',
      properties: { steps: { type: 'integer' }, bound: { type: 'number', default: 0.02 } },
    },
  },
};

const summary = (spec: { [name: string]: Json }) =>
  fieldsOf(spec, small).map(
    ({ path, isDefault }) => `${path.join('.')}${isDefault ? ' default' : ''}`,
  );

describe('fieldsOf', () => {
  it('judges a field by the member of the union that the value is', () => {
    expect(summary({ recipe: { engine: 'a', margin: 4 } })).toEqual([
      'recipe.engine',
      'recipe.margin',
    ]);
    expect(summary({ recipe: { engine: 'b', margin: 4 } })).toEqual([
      'recipe.engine',
      'recipe.margin default',
    ]);
  });
  it('goes into what may be null', () => {
    expect(summary({ parity: null })).toEqual(['parity default']);
    expect(summary({ parity: { steps: 5, bound: 0.02 } })).toEqual([
      'parity.steps',
      'parity.bound default',
    ]);
  });
  it('takes free objects whole, and empty ones for nothing', () => {
    expect(summary({ labels: {} })).toEqual(['labels default']);
    expect(summary({ labels: { a: 'b' } })).toEqual(['labels']);
  });
  it("finds a default of the service's own schema", () => {
    const fields = fieldsOf({ training: { steps: 20, batch_size: 8 } }, schema);
    expect(fields.map(({ path, isDefault }) => [path.join('.'), isDefault])).toEqual([
      ['training.steps', false],
      ['training.batch_size', true],
    ]);
    expect(fields[1]?.description).not.toBe('');
  });
});

describe('originOf', () => {
  const spec = {
    name: null,
    recipe: { engine: 'b', margin: 2 },
    parity: { steps: 5, bound: 0.02 },
    labels: {},
  };
  const origins = (given: { [name: string]: Json } | null) =>
    Object.fromEntries(
      fieldsOf(spec, small).map((field) => [field.path.join('.'), originOf(field, given)]),
    );
  it('is what was written, also where it is the default, and apart from that what was not', () => {
    const given = { name: null, recipe: { margin: 2 }, parity: { steps: 5 } };
    expect(origins(given)).toEqual({
      name: 'set',
      // Without a word the kind is the one that has a default.
      'recipe.engine': 'default',
      'recipe.margin': 'set',
      'parity.steps': 'set',
      'parity.bound': 'default',
      labels: 'default',
    });
  });
  it('tells what comes of a named recipe, and what the service found', () => {
    const named = origins({ recipe: { name: 'house' }, parity: null });
    expect(named).toMatchObject({ 'recipe.engine': 'recipe', 'recipe.margin': 'recipe' });
    expect(named['parity.steps']).toBe('service');
  });
  it('is guessed by the defaults where nobody knows', () => {
    expect(origins(null)).toMatchObject({ name: 'default', 'recipe.margin': 'set' });
  });
});

describe('copyOf', () => {
  it('has what was set and what is no default, each where it was', () => {
    const spec = { name: 'x', recipe: { engine: 'b', margin: 4 }, parity: null, labels: {} };
    const fields = fieldsOf(spec, small);
    expect(copyOf(fields, null)).toEqual({ name: 'x', recipe: { engine: 'b' } });
    // The name was found by the service, the margin written though it is the default.
    expect(copyOf(fields, { recipe: { margin: 4 } })).toEqual({
      name: 'x',
      recipe: { engine: 'b', margin: 4 },
    });
  });
});

describe('mergePatch', () => {
  it('says what changed, and null for what was removed', () => {
    const from = { a: 1, b: { c: 2, d: 3 }, e: [1, 2] };
    const to = { a: 1, b: { c: 5 }, e: [1], f: true };
    expect(mergePatch(from, to)).toEqual({ b: { c: 5, d: null }, e: [1], f: true });
  });
  it('has a part of another kind whole: the service begins it anew', () => {
    const from = { recipe: { engine: 'emulated', amax_history_len: 4 }, data: { name: 'a' } };
    const to = { recipe: { engine: 'te', amax_history_len: 4 }, data: { name: 'b' } };
    expect(mergePatch(from, to)).toEqual(to);
    const same = { recipe: { engine: 'emulated', amax_history_len: 8 }, data: { name: 'a' } };
    expect(mergePatch(from, same)).toEqual({ recipe: { amax_history_len: 8 } });
  });
  it('is empty for no change', () =>
    expect(mergePatch({ a: { b: [1] } }, { a: { b: [1] } })).toEqual({}));
});

describe('same', () => {
  it('compares by value', () => {
    expect(same({ a: [1, { b: null }] }, { a: [1, { b: null }] })).toBe(true);
    expect(same({ a: 1, b: 2 }, { b: 2, a: 1 })).toBe(true);
    expect(same({ a: 1 }, { a: 1, b: 2 })).toBe(false);
    expect(same([], {})).toBe(false);
    expect(same(undefined, null)).toBe(false);
  });
});
