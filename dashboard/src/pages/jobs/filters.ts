/** What the list shows, as it stands in the address: links to a view can be kept and sent. */

import type { Search } from '~/app/search';

export const SORTS = {
  '-created_at': 'Newest first',
  created_at: 'Oldest first',
  '-ended_at': 'Ended last',
  '-priority': 'Priority',
  name: 'Name',
  status: 'Status',
} as const;

export const STATUSES = [
  'draft',
  'queued',
  'starting',
  'running',
  'pausing',
  'paused',
  'cancelling',
  'succeeded',
  'failed',
  'cancelled',
] as const;

const FINAL: readonly string[] = ['succeeded', 'failed', 'cancelled'];

/** Groups that people ask for, in place of ten boxes. */
export const GROUPS: Record<string, { label: string; statuses: readonly string[] }> = {
  all: { label: 'All', statuses: [] },
  active: { label: 'Active', statuses: ['starting', 'running', 'pausing', 'cancelling'] },
  queued: { label: 'Queued', statuses: ['queued'] },
  paused: { label: 'Paused', statuses: ['paused'] },
  succeeded: { label: 'Succeeded', statuses: ['succeeded'] },
  failed: { label: 'Failed', statuses: ['failed'] },
  cancelled: { label: 'Cancelled', statuses: ['cancelled'] },
  drafts: { label: 'Drafts', statuses: ['draft'] },
};

export interface Filters {
  text: string;
  statuses: readonly string[];
  labels: Readonly<Record<string, string>>;
  sort: string;
}

const PREFIX = 'label.';
const ORDER = /^-?(created_at|ended_at|name|priority|status)$/;

/** Reads the address; what it cannot mean is passed over. */
export function readFilters(search: Search): Filters {
  const known = new Set<string>(STATUSES);
  const labels = Object.entries(search).flatMap(([name, value]) =>
    name.startsWith(PREFIX) && name.length > PREFIX.length && value !== undefined
      ? [[name.slice(PREFIX.length), String(value)] as const]
      : [],
  );
  const sort = String(search.sort ?? '');
  return {
    text: String(search.q ?? ''),
    statuses: String(search.status ?? '')
      .split(',')
      .filter((status) => known.has(status)),
    labels: Object.fromEntries(labels),
    sort: ORDER.test(sort) ? sort : '-created_at',
  };
}

/** The address of these filters; what is as it is without is left out. */
export function writeFilters(filters: Filters): Search {
  const search: Search = {};
  if (filters.text.trim() !== '') search.q = filters.text.trim();
  if (filters.statuses.length > 0) search.status = filters.statuses.join(',');
  for (const [name, value] of Object.entries(filters.labels)) search[PREFIX + name] = value;
  if (filters.sort !== '-created_at') search.sort = filters.sort;
  return search;
}

/** The members of a job that a row shows: the spec of each would be most of the answer. */
export const ROW_FIELDS = [
  'name',
  'status',
  'reason',
  'detail',
  'is_final',
  'progress',
  'latest_metrics',
  'attempts',
  'device',
  'labels',
  'owner',
  'priority',
  'queue_position',
  'waiting_for',
  'created_at',
  'started_at',
  'ended_at',
  'version',
] as const;

/** The query of `GET /jobs` for these filters. */
export function listQuery(filters: Filters, limit: number, cursor?: string | null): string {
  const query = new URLSearchParams({ limit: String(limit), sort: filters.sort });
  query.set('fields', ROW_FIELDS.join(','));
  if (filters.text !== '') query.set('q', filters.text);
  if (filters.statuses.length > 0) query.set('status', filters.statuses.join(','));
  for (const [name, value] of Object.entries(filters.labels)) query.set(PREFIX + name, value);
  if (cursor) query.set('cursor', cursor);
  return query.toString();
}

/** The jobs of these labels and this text that have ended last, whatever statuses are looked for. */
export function endedQuery(filters: Filters, limit: number): string {
  return listQuery({ ...filters, statuses: FINAL, sort: '-ended_at' }, limit);
}

/** Whether two lists of statuses are the same group. */
export function sameStatuses(one: readonly string[], other: readonly string[]): boolean {
  return one.length === other.length && one.every((status) => other.includes(status));
}
