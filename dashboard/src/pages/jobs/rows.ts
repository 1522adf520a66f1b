/** The rows of a list that is read page by page and patched while it is shown. */

import type { InfiniteData } from '@tanstack/react-query';
import type { Schemas } from '~/api/client';
import type { ROW_FIELDS } from './filters';

/** What a row shows of a job. */
export type JobRow = Pick<Schemas['JobObject'], 'id' | (typeof ROW_FIELDS)[number]>;

export interface JobPage {
  items: JobRow[];
  next_cursor: string | null;
}

/** Rows of all pages, each job once: one that moved between two reads is in both. */
export function unique(pages: readonly JobPage[]): JobRow[] {
  const seen = new Set<string>();
  const rows: JobRow[] = [];
  for (const page of pages) {
    for (const row of page.items) {
      if (!seen.has(row.id)) rows.push(row);
      seen.add(row.id);
    }
  }
  return rows;
}

/** The pages with news of their jobs; the very same object where there are none. */
export function merged(
  old: InfiniteData<JobPage>,
  fresh: ReadonlyMap<string, Partial<JobRow>>,
): InfiniteData<JobPage> {
  let changed = false;
  const pages = old.pages.map((page) => {
    let touched = false;
    const items = page.items.map((row) => {
      const news = fresh.get(row.id);
      // A poll may have been answered before a status that was told meanwhile.
      if (!news || (news.version !== undefined && news.version < row.version)) return row;
      touched = true;
      return { ...row, ...news };
    });
    changed ||= touched;
    return touched ? { ...page, items } : page;
  });
  return changed ? { ...old, pages } : old;
}

/** The pages without the job; the very same object where it is in none of them. */
export function without(old: InfiniteData<JobPage>, jobId: string): InfiniteData<JobPage> {
  let found = false;
  const pages = old.pages.map((page) => {
    const items = page.items.filter((row) => row.id !== jobId);
    if (items.length === page.items.length) return page;
    found = true;
    return { ...page, items };
  });
  return found ? { ...old, pages } : old;
}
