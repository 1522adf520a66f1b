import { describe, expect, it } from 'vitest';
import { widest } from './widest';

describe('widest', () => {
  it('finds the longest text, and the longest word', () => {
    expect(widest(['a', 'some few words here', 'incomprehensible', 'b'])).toEqual([1, 2]);
    expect(widest(['one', 'two'])).toEqual([0, 0]);
  });
  it('is of no row where there is none', () => {
    expect(widest([])).toEqual([]);
  });
});
