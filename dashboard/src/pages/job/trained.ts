import type { Schemas } from '~/api/client';

type Attempt = Pick<Schemas['AttemptSummary'], 'started_at' | 'ended_at'>;

/**
 * How many seconds a job was at work: those of its attempts, without the time in which it was paused
 * or waited for a node; null before the first.
 */
export function secondsAtWork(attempts: readonly Attempt[], now = Date.now()): number | null {
  const began = attempts.filter(({ started_at }) => started_at !== null);
  if (began.length === 0) return null;
  return began.reduce((sum, { started_at, ended_at }) => {
    const end = ended_at === null ? now : Date.parse(ended_at);
    return sum + Math.max(0, end - Date.parse(started_at ?? '')) / 1000;
  }, 0);
}

/** What the newest attempt is at; null when it has ended, as that of a paused job. */
export function phaseOf(
  attempts: readonly Pick<Schemas['AttemptSummary'], 'phase' | 'ended_at'>[],
) {
  const newest = attempts.at(-1);
  return newest === undefined || newest.ended_at !== null ? null : newest.phase;
}
