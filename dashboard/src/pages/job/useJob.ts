import { keepPreviousData, useQuery, useQueryClient } from '@tanstack/react-query';
import { useEffect, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import { ApiError } from '~/api/problem';
import { openStream } from '~/api/stream';

export type Job = Schemas['JobDetail'];

async function json<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, { signal })).json()) as T;
}

const base = (id: string) => `/v1/jobs/${encodeURIComponent(id)}`;
// How long they may lag behind: each time all that are shown are read in one request.
const CURVES_MS = 3000;
const EVENTS_MS = 1500;
const ENDED_MS = 30_000;
// What is not there yet, or of an attempt before, is asked for again so often.
const ABSENT_MS = 4000;
// Nobody reads a number that changes more often than this.
const PROGRESS_MS = 200;

/** Does it a while after it was first asked for, however often that is meanwhile. */
function atMostEvery(pause: number, work: () => void) {
  let timer: ReturnType<typeof setTimeout> | undefined;
  return {
    soon: () => {
      timer ??= setTimeout(() => {
        timer = undefined;
        work();
      }, pause);
    },
    stop: () => clearTimeout(timer),
  };
}

/** The job, kept up to date by its stream; `live` tells whether that is open. */
export function useJob(id: string) {
  const queries = useQueryClient();
  const [live, setLive] = useState(false);
  const query = useQuery({
    queryKey: ['job', id, 'object'],
    queryFn: ({ signal }) => json<Job>(base(id), signal),
    // One that has ended changes no more, but may be deleted while somebody looks at it.
    refetchInterval: ({ state }) => (state.data?.is_final ? ENDED_MS : live ? false : 5000),
  });
  const final = query.data?.is_final;
  const known = query.data !== undefined;
  useEffect(() => {
    if (!known || final) return;
    const read = (...parts: string[]) => {
      for (const part of parts) void queries.invalidateQueries({ queryKey: ['job', id, part] });
    };
    const readObject = atMostEvery(400, () => read('object'));
    const readEvents = atMostEvery(EVENTS_MS, () => read('events'));
    const readCurves = atMostEvery(CURVES_MS, () => {
      if (document.visibilityState === 'visible') read('object', 'curves');
    });
    let progress: Partial<Job['progress']> = {};
    const showProgress = atMostEvery(PROGRESS_MS, () =>
      queries.setQueryData<Job>(
        ['job', id, 'object'],
        (old) => old && { ...old, progress: { ...old.progress, ...progress } },
      ),
    );
    const after = queries.getQueryData<Job>(['job', id, 'object'])?.last_event ?? 0;
    const close = openStream({
      // One metric is enough to hear that there is something new.
      path: `${base(id)}/stream?include=status,events,metrics&metrics=train/loss`,
      after,
      newest: ['progress', 'metrics', 'gap'],
      on: {
        status: () => {
          readObject.soon();
          readEvents.soon();
        },
        event: () => {
          readObject.soon();
          readEvents.soon();
        },
        metrics: readCurves.soon,
        gap: readCurves.soon,
        progress: (data) => {
          progress = data as Partial<Job['progress']>;
          showProgress.soon();
        },
        reset: () => void queries.invalidateQueries({ queryKey: ['job', id] }),
        end: () => void queries.invalidateQueries({ queryKey: ['job', id] }),
      },
      onLive: setLive,
    });
    return () => {
      for (const reading of [readObject, readEvents, readCurves, showProgress]) reading.stop();
      close();
    };
  }, [queries, id, known, final]);
  return { ...query, live };
}

/** The series of these names as buckets, of a range of steps or all. */
export function useCurves(
  id: string,
  names: readonly string[],
  range: readonly [number, number] | null,
  points = 600,
) {
  return useQuery({
    queryKey: ['job', id, 'curves', names, range, points],
    queryFn: ({ signal }) => {
      const query = new URLSearchParams(names.map((name) => ['name', name]));
      query.set('form', 'buckets');
      query.set('max_points', String(points));
      if (range) {
        query.set('from_step', String(Math.max(0, Math.floor(range[0]))));
        query.set('to_step', String(Math.ceil(range[1])));
      }
      return json<Schemas['SeriesList']>(`${base(id)}/metrics?${query}`, signal);
    },
    enabled: names.length > 0,
    placeholderData: keepPreviousData,
    // An answer of the same number of the job is the same; others are not compared number by number.
    structuralSharing: (old, fresh) => {
      const [before, after] = [old, fresh] as Partial<Schemas['SeriesList']>[];
      return before?.cursor !== undefined && before.cursor === after?.cursor ? old : fresh;
    },
  });
}

// All names that do not begin with `fp8/`: patterns have no other way to say so.
const OUTSIDE_HEALTH = ['[!f]*', 'f', 'f[!p]*', 'fp', 'fp[!8]*', 'fp8', 'fp8[!/]*'];

/** Names and newest values of the job's metrics outside FP8 health; of a job that goes on, new ones too. */
export function useLatest(job: Job) {
  return useQuery({
    queryKey: ['job', job.id, 'latest'],
    queryFn: ({ signal }) => {
      const query = new URLSearchParams(OUTSIDE_HEALTH.map((pattern) => ['name', pattern]));
      query.set('limit', '500');
      return json<Schemas['LatestPage']>(`${base(job.id)}/metrics/latest?${query}`, signal);
    },
    staleTime: 15_000,
    refetchInterval: job.is_final ? false : 15_000,
  });
}

export function useCheckpoints(id: string) {
  return useQuery({
    queryKey: ['job', id, 'events', 'checkpoints'],
    queryFn: ({ signal }) =>
      json<Schemas['ArtifactList']>(`${base(id)}/artifacts?kind=checkpoint`, signal),
    staleTime: 5000,
  });
}

export function useConversion(job: Job) {
  return useAttemptReport<Schemas['ConversionReport']>(job, 'conversion');
}

export function usePrecision(job: Job) {
  return useAttemptReport<Schemas['PrecisionTable']>(job, 'precision');
}

/** What each attempt reports once, soon after it began: no event tells that it is there. */
function useAttemptReport<Report extends { attempt: number }>(job: Job, name: string) {
  return useQuery({
    queryKey: ['job', job.id, name],
    queryFn: ({ signal }) => json<Report>(`${base(job.id)}/${name}`, signal),
    enabled: job.attempt > 0,
    // That it is not there yet is no failure to be tried again at once.
    retry: (count, error) => count < 3 && !(error instanceof ApiError && error.status === 404),
    refetchInterval: ({ state }) =>
      job.is_final || state.data?.attempt === job.attempt ? false : ABSENT_MS,
  });
}

/** Events of some kinds (all without), newest first. */
export function useEvents(id: string, kinds: readonly string[] = [], limit = 200) {
  return useQuery({
    queryKey: ['job', id, 'events', kinds, limit],
    queryFn: ({ signal }) => {
      const query = new URLSearchParams({ order: 'desc', limit: String(limit) });
      if (kinds.length > 0) query.set('kind', kinds.join(','));
      return json<Schemas['EventList']>(`${base(id)}/events?${query}`, signal);
    },
    placeholderData: keepPreviousData,
  });
}

export { base as jobPath, json as readJson };
