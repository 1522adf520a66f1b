import { describe, expect, it } from 'vitest';
import { levelsFrom, logQuery, matches } from './logFilter';

const line = {
  seq: 1,
  time: 0,
  stream: 'stdout',
  attempt: 2,
  text: 'CUDA out of Memory',
  level: 'error' as const,
  rank: null,
};

describe('the filter of a log', () => {
  it('asks for a level and all above', () => {
    expect(levelsFrom('warning')).toEqual(['warning', 'error', 'critical']);
    expect(levelsFrom('')).toEqual([]);
    expect(logQuery({ level: 'error', text: 'a b', attempt: 3 })).toBe(
      'level=error%2Ccritical&text=a+b&attempt=3',
    );
    expect(logQuery({ level: '', text: '', attempt: null })).toBe('');
  });
  it('takes lines of the stream by the same rules', () => {
    const all = { level: '', text: '', attempt: null };
    expect(matches(line, all)).toBe(true);
    expect(matches({ ...line, level: null }, all)).toBe(true);
    expect(matches({ ...line, level: null }, { ...all, level: 'debug' })).toBe(false);
    expect(matches(line, { ...all, level: 'critical' })).toBe(false);
    expect(matches(line, { ...all, text: 'MEMORY' })).toBe(true);
    expect(matches(line, { ...all, text: 'disk' })).toBe(false);
    expect(matches(line, { ...all, attempt: 1 })).toBe(false);
  });
});
