/** The lines of a log that a page holds: a part without gaps, of bounded size while it grows. */

import type { Schemas } from '~/api/client';

type LogLine = Schemas['LogLine'];
type LogPage = Pick<Schemas['LogPage'], 'lines' | 'next_before'>;

/** A day's lines would fill the memory of a page that is open all day. */
export const KEPT = 20_000;

export interface Held {
  lines: LogLine[];
  /** What to ask for lines before these with; null at the beginning of the log. */
  before: number | null;
  /** Whether lines have come since that are not held: the end is to be read anew. */
  behind: boolean;
}

/** What was read of the end of the log. */
export function heldOf(page: LogPage): Held {
  return { lines: page.lines, before: page.next_before ?? null, behind: false };
}

/**
 * With the lines that were just printed. A reader of the end loses the oldest lines, which can be
 * read again; from one who looks back nothing is taken, and what is too much is left unread.
 */
export function withNews(held: Held, fresh: readonly LogLine[], following: boolean): Held {
  if (held.behind) return held;
  const newest = held.lines.at(-1)?.seq ?? 0;
  const news = fresh.filter(({ seq }) => seq > newest);
  if (news.length === 0) return held;
  const lines = [...held.lines, ...news];
  if (lines.length <= KEPT) return { ...held, lines };
  if (!following) return { ...held, behind: true };
  const kept = lines.slice(-KEPT);
  return { lines: kept, before: kept[0]?.seq ?? null, behind: false };
}

/** With the page that was asked for by `before`, unless others are the first by now. */
export function withOlder(held: Held, before: number, page: LogPage): Held {
  if (held.before !== before) return held;
  return { ...held, lines: [...page.lines, ...held.lines], before: page.next_before ?? null };
}
