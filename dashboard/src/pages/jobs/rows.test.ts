import { describe, expect, it } from 'vitest';
import { type JobPage, type JobRow, merged, unique, without } from './rows';

const row = (id: string, version = 1, step = 0) =>
  ({ id, version, status: 'running', progress: { step } }) as unknown as JobRow;
const page = (...items: JobRow[]): JobPage => ({ items, next_cursor: null });
const pages = (...list: JobPage[]) => ({ pages: list, pageParams: list.map(() => null) });

describe('unique', () => {
  it('has each job once, where it came first', () => {
    const rows = unique([page(row('a'), row('b')), page(row('b', 2), row('c'))]);
    expect(rows.map(({ id, version }) => `${id}${version}`)).toEqual(['a1', 'b1', 'c1']);
  });
});

describe('merged', () => {
  it('replaces what changed and keeps the rest the same objects', () => {
    const old = pages(page(row('a'), row('b')), page(row('c')));
    const next = merged(
      old,
      new Map([['b', { version: 2, progress: { step: 9 } } as Partial<JobRow>]]),
    );
    expect(next.pages[0]?.items[1]?.progress.step).toBe(9);
    expect(next.pages[0]?.items[0]).toBe(old.pages[0]?.items[0]);
    expect(next.pages[1]).toBe(old.pages[1]);
  });
  it('takes no older version: an answer may have been overtaken', () => {
    const old = pages(page(row('a', 5)));
    expect(merged(old, new Map([['a', row('a', 4)]]))).toBe(old);
  });
  it('takes a status that was told without a version', () => {
    const news = new Map([['a', { status: 'failed' } as Partial<JobRow>]]);
    expect(merged(pages(page(row('a', 5))), news).pages[0]?.items[0]?.status).toBe('failed');
  });
  it('is the very same where nobody is concerned', () => {
    const old = pages(page(row('a')));
    expect(merged(old, new Map([['z', row('z')]]))).toBe(old);
  });
});

describe('without', () => {
  it('leaves the job out, wherever it is, and keeps other pages the same objects', () => {
    const old = pages(page(row('a'), row('b')), page(row('c')));
    const next = without(old, 'a');
    expect(unique(next.pages).map(({ id }) => id)).toEqual(['b', 'c']);
    expect(next.pages[1]).toBe(old.pages[1]);
  });
  it('is the very same where the job is not listed', () => {
    const old = pages(page(row('a')));
    expect(without(old, 'z')).toBe(old);
  });
});
