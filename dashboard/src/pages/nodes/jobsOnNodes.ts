/** What runs where: of each job that is on a node the little that a card shows. */

import { useQuery } from '@tanstack/react-query';
import { request, type Schemas } from '~/api/client';

const MEMBERS = ['name', 'status', 'attempts'] as const;
export type PlacedJob = Pick<Schemas['JobObject'], 'id' | (typeof MEMBERS)[number]>;

interface Page {
  items: PlacedJob[];
  next_cursor: string | null;
}

const PLACED: Schemas['Status'][] = ['starting', 'running', 'pausing', 'cancelling'];
const REFRESH_MS = 5000;

/** The path of a page of the list: without specs and metrics, which are most of a job. */
export function placedPath(cursor: string | null): string {
  const query = new URLSearchParams({ limit: '500', fields: MEMBERS.join(',') });
  query.set('status', PLACED.join(','));
  if (cursor !== null) query.set('cursor', cursor);
  return `/v1/jobs?${query}`;
}

/**
 * All jobs that are on nodes, however many. An answer that has not changed is not sent again: the
 * browser asks with the ETag that it keeps.
 */
export function usePlacedJobs() {
  return useQuery({
    queryKey: ['jobs', 'on-nodes'],
    queryFn: async ({ signal }) => {
      const jobs: PlacedJob[] = [];
      let cursor: string | null = null;
      do {
        const page = (await (await request(placedPath(cursor), { signal })).json()) as Page;
        jobs.push(...page.items);
        cursor = page.next_cursor;
      } while (cursor !== null);
      return jobs;
    },
    refetchInterval: REFRESH_MS,
  });
}

/** The jobs by the names of the nodes that they are on. */
export function byNode(jobs: readonly PlacedJob[]): ReadonlyMap<string, PlacedJob[]> {
  const found = new Map<string, PlacedJob[]>();
  for (const job of jobs) {
    const last = job.attempts.at(-1);
    if (last === undefined || last.ended_at !== null) continue;
    const others = found.get(last.node);
    if (others) others.push(job);
    else found.set(last.node, [job]);
  }
  return found;
}
