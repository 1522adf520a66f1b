import { describe, expect, it } from 'vitest';
import {
  endedQuery,
  type Filters,
  listQuery,
  readFilters,
  sameStatuses,
  writeFilters,
} from './filters';

const full: Filters = {
  text: 'llama',
  statuses: ['running', 'queued'],
  labels: { team: 'nlp', 'run/id': '7' },
  sort: '-priority',
};

describe('filters in the address', () => {
  it('come back as they went', () => expect(readFilters(writeFilters(full))).toEqual(full));
  it('need nothing for the plain list', () => {
    expect(writeFilters(readFilters({}))).toEqual({});
    expect(readFilters({}).sort).toBe('-created_at');
  });
  it('pass over what they cannot mean', () => {
    const filters = readFilters({
      status: 'running,levitating',
      sort: 'colour',
      'label.': 'x',
      other: 'y',
    });
    expect(filters).toEqual({ text: '', statuses: ['running'], labels: {}, sort: '-created_at' });
  });
});

describe('listQuery', () => {
  it('is what the service understands', () => {
    const query = new URLSearchParams(listQuery(full, 250, 'next'));
    expect(query.get('q')).toBe('llama');
    expect(query.get('status')).toBe('running,queued');
    expect(query.get('label.team')).toBe('nlp');
    expect(query.get('label.run/id')).toBe('7');
    expect(query.get('sort')).toBe('-priority');
    expect(query.get('limit')).toBe('250');
    expect(query.get('cursor')).toBe('next');
  });
  it('asks for no spec: it would be most of the answer', () => {
    const fields = new URLSearchParams(listQuery(full, 1)).get('fields')?.split(',');
    expect(fields).toContain('latest_metrics');
    expect(fields).not.toContain('spec');
  });
});

describe('endedQuery', () => {
  it('asks for what has ended, of the same text and labels', () => {
    const query = new URLSearchParams(endedQuery(full, 9));
    expect(query.get('status')).toBe('succeeded,failed,cancelled');
    expect(query.get('sort')).toBe('-ended_at');
    expect(query.get('label.team')).toBe('nlp');
    expect(query.get('q')).toBe('llama');
  });
});

describe('sameStatuses', () => {
  it('takes no notice of order', () => {
    expect(sameStatuses(['a', 'b'], ['b', 'a'])).toBe(true);
    expect(sameStatuses(['a'], ['a', 'b'])).toBe(false);
    expect(sameStatuses([], [])).toBe(true);
  });
});
