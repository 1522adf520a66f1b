import { useEffect, useRef, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import { ApiError } from '~/api/problem';
import { numberOf } from '~/format/numbers';
import type { JobRow } from './rows';
import { ofOneLength } from './sparklineGroups';

const POINTS = 80;
const AGAIN_MS = 15_000;
// After a failure.
const SOON_MS = 2000;
const MOST = 60;

interface Entry {
  values: number[];
  at: number;
  /** Whether it can change no more: read to its end, or of a job that is gone. */
  done: boolean;
}

/** The losses of the jobs in view as short curves: one request for all of a like length that are due. */
export function useSparklines(
  visible: readonly Pick<JobRow, 'id' | 'is_final' | 'started_at' | 'progress'>[],
): ReadonlyMap<string, number[]> {
  const known = useRef(new Map<string, Entry>());
  const [curves, setCurves] = useState<ReadonlyMap<string, number[]>>(new Map());
  const wanted = useRef(visible);
  wanted.current = visible;

  useEffect(() => {
    let stopped = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    async function look() {
      const now = Date.now();
      const all = wanted.current.filter(({ id, started_at }) => {
        if (started_at === null) return false;
        const entry = known.current.get(id);
        return !entry || (!entry.done && now - entry.at > AGAIN_MS);
      });
      const due = ofOneLength(all).slice(0, MOST);
      if (due.length > 0) {
        try {
          const query = new URLSearchParams(due.map(({ id }) => ['job', id]));
          query.set('name', 'train/loss');
          query.set('form', 'buckets');
          query.set('max_points', String(POINTS));
          const answer = await request(`/v1/metrics/query?${query}`);
          const { series } = (await answer.json()) as Schemas['JobsSeries'];
          for (const { id, is_final } of due) {
            const values = series
              .filter((each) => each.job_id === id)
              .flatMap((each) => (each.buckets?.mean ?? []).map(numberOf));
            known.current.set(id, { values, at: now, done: is_final });
          }
          if (!stopped) {
            setCurves(new Map([...known.current].map(([id, entry]) => [id, entry.values])));
          }
        } catch (error) {
          // Asked for again later, but for a job that was deleted meanwhile: it spoils the others'.
          for (const { id } of due) {
            const gone =
              error instanceof ApiError && error.status === 404 && error.message.includes(id);
            const values = known.current.get(id)?.values ?? [];
            known.current.set(id, { values, at: now - AGAIN_MS + SOON_MS, done: gone });
          }
        }
      }
      if (!stopped) timer = setTimeout(() => void look(), all.length > due.length ? 50 : 700);
    }
    void look();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, []);
  return curves;
}
