import { describe, expect, it } from 'vitest';
import { differences } from './specDiff';

describe('differences', () => {
  it('names the fields that differ alone, the recipe first', () => {
    const one = { name: 'a', training: { steps: 1, lr: 2 }, recipe: { engine: 'te', margin: 0 } };
    const two = { name: 'b', training: { steps: 1, lr: 3 }, recipe: { engine: 'amp' } };
    expect(differences([one, two])).toEqual([
      { path: 'recipe.engine', values: ['te', 'amp'] },
      { path: 'recipe.margin', values: [0, undefined] },
      { path: 'training.lr', values: [2, 3] },
    ]);
  });
  it('tells the whole where one has none', () => {
    expect(differences([{ parity: null }, { parity: { steps: 5 } }])).toEqual([
      { path: 'parity', values: [null, { steps: 5 }] },
    ]);
  });
  it('is empty for the same, and for names and labels', () => {
    expect(
      differences([
        { name: 'a', labels: { x: '1' }, a: [1] },
        { name: 'b', labels: {}, a: [1] },
      ]),
    ).toEqual([]);
  });
});
