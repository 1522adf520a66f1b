import { describe, expect, test } from 'vitest';
import { byNode, type PlacedJob, placedPath } from './jobsOnNodes';

const job = (id: string, ...attempts: [node: string, ended: string | null][]) =>
  ({
    id,
    name: id,
    status: 'running',
    attempts: attempts.map(([node, ended_at]) => ({ node, ended_at })),
  }) as PlacedJob;

describe('jobs on nodes', () => {
  test('a job is on the node of its newest attempt, while that goes on', () => {
    const found = byNode([
      job('moved', ['one', '2026-01-01T00:00:00Z'], ['two', null]),
      job('ended', ['one', '2026-01-01T00:00:00Z']),
      job('waits'),
      job('stays', ['two', null]),
    ]);
    expect([...found].map(([node, jobs]) => [node, jobs.map(({ id }) => id)])).toEqual([
      ['two', ['moved', 'stays']],
    ]);
  });

  test('neither specs nor metrics are asked for', () => {
    const query = new URL(placedPath('behind the first'), 'http://localhost').searchParams;
    expect(query.get('fields')).toBe('name,status,attempts');
    expect(query.get('cursor')).toBe('behind the first');
    expect(query.get('status')?.split(',')).toContain('running');
  });
});
