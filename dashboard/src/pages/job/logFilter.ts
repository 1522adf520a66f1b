import type { Schemas } from '~/api/client';

export interface LogFilter {
  /** Lines of this level and of weightier ones; '' for all, those without a level too. */
  level: string;
  text: string;
  attempt: number | null;
}

const ORDER = ['debug', 'info', 'warning', 'error', 'critical'];

/** The levels from this one on. */
export function levelsFrom(level: string): string[] {
  const index = ORDER.indexOf(level);
  return index < 0 ? [] : ORDER.slice(index);
}

/** The query by which the service filters the same way as `matches`. */
export function logQuery(filter: LogFilter): string {
  const query = new URLSearchParams();
  const levels = levelsFrom(filter.level);
  if (levels.length > 0) query.set('level', levels.join(','));
  if (filter.text !== '') query.set('text', filter.text);
  if (filter.attempt !== null) query.set('attempt', String(filter.attempt));
  return query.toString();
}

/** Whether a line of the stream, which knows no filter, belongs to what is shown. */
export function matches(line: Schemas['LogLine'], filter: LogFilter): boolean {
  const levels = levelsFrom(filter.level);
  if (levels.length > 0 && !(line.level && levels.includes(line.level))) return false;
  if (filter.attempt !== null && line.attempt !== filter.attempt) return false;
  return line.text.toLowerCase().includes(filter.text.toLowerCase());
}
