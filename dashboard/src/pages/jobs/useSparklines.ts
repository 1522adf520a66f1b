import { useEffect, useRef, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import { numberOf } from '~/format/numbers';

const POINTS = 40;
const AGAIN_MS = 15_000;
const MOST = 60;

interface Entry {
  values: number[];
  at: number;
}

/** The losses of the jobs in view as short curves: one request for all that are due. */
export function useSparklines(
  visible: readonly { id: string; is_final: boolean; started_at: string | null }[],
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
      const due = wanted.current
        .filter(({ id, is_final, started_at }) => {
          if (started_at === null) return false;
          const entry = known.current.get(id);
          return !entry || (!is_final && now - entry.at > AGAIN_MS);
        })
        .slice(0, MOST);
      if (due.length > 0) {
        try {
          const query = new URLSearchParams(due.map(({ id }) => ['job', id]));
          query.set('name', 'train/loss');
          query.set('form', 'buckets');
          query.set('max_points', String(POINTS));
          const answer = await request(`/v1/metrics/query?${query}`);
          const { series } = (await answer.json()) as Schemas['JobsSeries'];
          for (const { id } of due) {
            const values = series
              .filter((each) => each.job_id === id)
              .flatMap((each) => (each.buckets?.mean ?? []).map(numberOf));
            known.current.set(id, { values, at: now });
          }
          if (!stopped) {
            setCurves(new Map([...known.current].map(([id, entry]) => [id, entry.values])));
          }
        } catch {
          // A curve that could not be read is asked for again.
        }
      }
      if (!stopped) timer = setTimeout(() => void look(), 700);
    }
    void look();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, []);
  return curves;
}
