import { type InfiniteData, useInfiniteQuery, useQueryClient } from '@tanstack/react-query';
import { useEffect, useMemo, useState } from 'react';
import { request } from '~/api/client';
import { openStream } from '~/api/stream';
import { endedQuery, type Filters, listQuery } from './filters';
import { type JobPage, type JobRow, merged, unique, without } from './rows';

const PAGE = 250;
// While jobs run, what rows show of them is asked for again so often.
const REFRESH_MS = 4000;
// A list of one page is read again so often.
const AGAIN_MS = 30_000;
const LIVE = ['queued', 'starting', 'running', 'pausing', 'cancelling'];

const isShort = (data: InfiniteData<JobPage> | undefined) => (data?.pages.length ?? 0) <= 1;

const isSeen = () => document.visibilityState === 'visible';

async function readPage(query: string, signal?: AbortSignal): Promise<JobPage> {
  return (await (await request(`/v1/jobs?${query}`, { signal })).json()) as JobPage;
}

/** The jobs of these filters, page by page as the list is scrolled, and live. */
export function useJobs(filters: Filters) {
  const queries = useQueryClient();
  const key = useMemo(() => ['jobs', 'list', listQuery(filters, PAGE)], [filters]);
  const list = useInfiniteQuery({
    queryKey: key,
    queryFn: ({ pageParam, signal }) => readPage(listQuery(filters, PAGE, pageParam), signal),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
    staleTime: AGAIN_MS,
    // A long list is not read anew under its reader.
    refetchOnWindowFocus: ({ state }) => isShort(state.data),
  });
  const [live, setLive] = useState(false);
  const [unseen, setUnseen] = useState(0);
  const rows = useMemo(() => unique(list.data?.pages ?? []), [list.data]);
  const { refetch } = list;

  // biome-ignore lint/correctness/useExhaustiveDependencies: counted anew for each list
  useEffect(() => setUnseen(0), [key]);

  useEffect(() => {
    const data = () => queries.getQueryData<InfiniteData<JobPage>>(key);
    const patch = (fresh: Map<string, Partial<JobRow>>) =>
      queries.setQueryData<InfiniteData<JobPage>>(key, (old) => old && merged(old, fresh));

    // Status changes come by themselves; jobs that are not listed yet are read with the first page.
    let soon: ReturnType<typeof setTimeout> | undefined;
    let stopped = false;
    const onStatus = (message: unknown) => {
      const { job_id, status, reason, detail } = message as Record<string, string>;
      if (job_id === undefined) return;
      const listed = data()?.pages.some((page) => page.items.some((row) => row.id === job_id));
      if (listed) {
        patch(new Map([[job_id, { status, reason, detail } as Partial<JobRow>]]));
      } else if ((data()?.pages.length ?? 0) > 1) {
        setUnseen((count) => count + 1);
        return;
      }
      readSoon();
    };
    // A job that was deleted leaves a list of any length at once.
    const onEvent = (message: unknown) => {
      const { job_id, kind } = message as Record<string, string>;
      if (kind !== 'deleted' || job_id === undefined) return;
      queries.setQueryData<InfiniteData<JobPage>>(key, (old) => old && without(old, job_id));
      // An answer that is on its way may still have it.
      if (isShort(data())) readSoon();
    };
    function readSoon() {
      soon ??= setTimeout(() => {
        soon = undefined;
        if (isShort(data())) void refetch();
        else void readEnded();
      }, 1000);
    }
    // A long list is not read anew, and the poll below knows unfinished jobs alone.
    async function readEnded() {
      try {
        const page = await readPage(endedQuery(filters, PAGE));
        if (!stopped) patch(new Map(page.items.map((row) => [row.id, row])));
      } catch {
        // The next status that is told reads them again.
      }
    }
    let open = false;
    const close = openStream({
      path: '/v1/events/stream?include=status,events',
      on: { status: onStatus, event: onEvent, reset: () => void refetch() },
      onLive: (now) => {
        open = now;
        setLive(now);
      },
    });

    // Progress and metrics are no events: the unfinished jobs are polled, with an ETag.
    let etag: string | null = null;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let readAt = Date.now();
    const wanted = filters.statuses.length > 0 ? filters.statuses : LIVE;
    const statuses = wanted.filter((status) => LIVE.includes(status));
    async function poll() {
      try {
        if (isShort(data()) && Date.now() - readAt > AGAIN_MS && isSeen()) {
          readAt = Date.now();
          await refetch();
        }
        const unfinished = data()?.pages.some((page) => page.items.some((row) => !row.is_final));
        if (statuses.length > 0 && unfinished && isSeen()) {
          const query = listQuery({ ...filters, statuses }, 500);
          const headers: HeadersInit = etag === null ? {} : { 'If-None-Match': etag };
          const answer = await request(`/v1/jobs?${query}`, { headers, cache: 'no-store' });
          if (answer.status !== 304 && !stopped) {
            etag = answer.headers.get('ETag');
            const page = (await answer.json()) as JobPage;
            patch(new Map(page.items.map((row) => [row.id, row])));
          }
        } else if (!open && isSeen()) {
          // Why the stream is not there, an answer tells: the service is away, or the key no longer valid.
          await request('/v1/jobs?limit=1&fields=name');
        }
      } catch {
        // That the service is away is told to whoever asks `useReach`.
      }
      if (!stopped) timer = setTimeout(() => void poll(), REFRESH_MS);
    }
    timer = setTimeout(() => void poll(), REFRESH_MS);
    return () => {
      stopped = true;
      clearTimeout(timer);
      clearTimeout(soon);
      close();
    };
  }, [queries, key, filters, refetch]);

  return { ...list, rows, live, unseen };
}
