import { describe, expect, it } from 'vitest';
import { parseSearch, stringifySearch } from './search';

describe('the query of an address', () => {
  it('keeps texts texts, whatever they look like', () => {
    const search = { q: '007', 'label.team': 'a b&c=d', sort: '-name' };
    expect(parseSearch(stringifySearch(search))).toEqual(search);
  });
  it('leaves out what is empty', () => {
    expect(stringifySearch({ q: '', status: undefined })).toBe('');
    expect(stringifySearch({ q: 'x' })).toBe('?q=x');
  });
});
