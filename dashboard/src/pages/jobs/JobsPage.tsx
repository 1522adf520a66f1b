import { Link, useNavigate, useSearch } from '@tanstack/react-router';
import { useCallback, useEffect, useMemo, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import { useScope } from '~/app/session';
import { ConfirmDialog } from '~/components/Dialog';
import { LabelText } from '~/components/Name';
import { Page } from '~/components/Page';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { toast, toastError } from '~/components/Toast';
import { type Filters, GROUPS, readFilters, SORTS, sameStatuses, writeFilters } from './filters';
import { JobsGrid } from './JobsGrid';
import { useJobs } from './useJobs';

export default function JobsPage() {
  const search = useSearch({ strict: false }) as Record<string, string | undefined>;
  const navigate = useNavigate();
  const text = JSON.stringify(search);
  // biome-ignore lint/correctness/useExhaustiveDependencies: the same address is the same filters
  const filters = useMemo(() => readFilters(search), [text]);
  const change = useCallback(
    (changes: Partial<Filters>) =>
      void navigate({
        to: '/jobs',
        search: writeFilters({ ...filters, ...changes }),
        replace: 'text' in changes,
      }),
    [filters, navigate],
  );
  const jobs = useJobs(filters);
  const [everPicked, setPicked] = useState<ReadonlySet<string>>(new Set());
  // A job that was deleted, or fits the filters no more, is selected no more.
  const picked = useMemo(
    () => new Set(jobs.rows.map(({ id }) => id).filter((id) => everPicked.has(id))),
    [jobs.rows, everPicked],
  );
  // biome-ignore lint/correctness/useExhaustiveDependencies: another list, another selection
  useEffect(() => setPicked(new Set()), [filters]);

  const pick = useCallback((id: string, on: boolean) => {
    setPicked((old) => {
      const next = new Set(old);
      if (on) next.add(id);
      else next.delete(id);
      return next;
    });
  }, []);
  const label = useCallback(
    (name: string, value: string) => change({ labels: { ...filters.labels, [name]: value } }),
    [change, filters.labels],
  );
  const { hasNextPage, isFetchingNextPage, fetchNextPage, isFetchNextPageError } = jobs;
  const more = useCallback(() => {
    if (hasNextPage && !isFetchingNextPage && !isFetchNextPageError) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, isFetchNextPageError, fetchNextPage]);

  const bare =
    filters.text === '' &&
    filters.statuses.length === 0 &&
    Object.keys(filters.labels).length === 0;
  return (
    <div className="page jobs-page">
      <Page
        title="Jobs"
        actions={
          <>
            <span className="muted" role="status">
              {jobs.rows.length.toLocaleString('en-US')}
              {hasNextPage ? '+' : ''} {jobs.rows.length === 1 ? 'job' : 'jobs'} ·{' '}
              {jobs.live ? 'live' : 'connecting…'}
            </span>
            <Link to="/jobs/new" className="button primary">
              New job
            </Link>
          </>
        }
      >
        <FilterBar filters={filters} change={change} />
      </Page>
      {picked.size > 0 && (
        <Selection picked={picked} rows={jobs.rows} onDone={() => setPicked(new Set())} />
      )}
      {jobs.unseen > 0 && (
        <button type="button" className="button" onClick={() => void jobs.refetch()}>
          Something changed beyond this list: read it again
        </button>
      )}
      {jobs.isPending ? (
        <Loading label="Reading the jobs" />
      ) : jobs.isError && jobs.rows.length === 0 ? (
        <ErrorState error={jobs.error} onRetry={() => void jobs.refetch()} />
      ) : jobs.rows.length === 0 ? (
        bare ? (
          <EmptyState
            title="No jobs yet"
            action={
              <Link to="/jobs/new" className="button primary">
                Make the first one
              </Link>
            }
          >
            Submit one here, with <code>octrain submit -f spec.yaml</code> or{' '}
            <code>POST /jobs</code>: it appears here at once.
          </EmptyState>
        ) : (
          <EmptyState
            title="No job fits these filters"
            action={
              <button
                type="button"
                className="button"
                onClick={() => change({ text: '', statuses: [], labels: {} })}
              >
                Clear the filters
              </button>
            }
          />
        )
      ) : (
        <JobsGrid
          rows={jobs.rows}
          sort={filters.sort}
          onSort={(sort) => change({ sort })}
          picked={picked}
          onPick={pick}
          onPickAll={(on) => setPicked(new Set(on ? jobs.rows.map((job) => job.id) : []))}
          onLabel={label}
          onEnd={more}
        />
      )}
    </div>
  );
}

function FilterBar({
  filters,
  change,
}: {
  filters: Filters;
  change: (changes: Partial<Filters>) => void;
}) {
  const [text, setText] = useState(filters.text);
  useEffect(() => setText(filters.text), [filters.text]);
  // A moment after the last key, so that each letter is no request.
  useEffect(() => {
    if (text.trim() === filters.text) return;
    const timer = setTimeout(() => change({ text: text.trim() }), 300);
    return () => clearTimeout(timer);
  }, [text, filters.text, change]);
  return (
    <div className="filters" role="search">
      <input
        className="input"
        type="search"
        aria-label="Search by part of the name, or by id"
        placeholder="Search by name or id"
        value={text}
        onChange={(event) => setText(event.target.value)}
      />
      <fieldset className="segmented" aria-label="Status">
        {Object.entries(GROUPS).map(([name, group]) => (
          <button
            key={name}
            type="button"
            aria-pressed={sameStatuses(filters.statuses, group.statuses)}
            onClick={() => change({ statuses: group.statuses })}
          >
            {group.label}
          </button>
        ))}
      </fieldset>
      <select
        className="select small"
        aria-label="Order"
        value={filters.sort}
        onChange={(event) => change({ sort: event.target.value })}
      >
        {filters.sort in SORTS ? null : <option value={filters.sort}>{filters.sort}</option>}
        {Object.entries(SORTS).map(([value, label]) => (
          <option key={value} value={value}>
            {label}
          </option>
        ))}
      </select>
      {Object.entries(filters.labels).map(([name, value]) => (
        <button
          key={name}
          type="button"
          className="chip on"
          aria-label={`Remove the filter ${name}=${value}`}
          onClick={() => {
            const { [name]: _, ...rest } = filters.labels;
            change({ labels: rest });
          }}
        >
          <LabelText name={name} value={value} /> ×
        </button>
      ))}
    </div>
  );
}

function Selection(props: {
  picked: ReadonlySet<string>;
  rows: { id: string; is_final: boolean }[];
  onDone: () => void;
}) {
  const navigate = useNavigate();
  const [asking, setAsking] = useState(false);
  const [busy, setBusy] = useState(false);
  const mayWrite = useScope('jobs:write');
  const ids = props.rows
    .filter((job) => props.picked.has(job.id) && !job.is_final)
    .map((job) => job.id);

  async function cancel() {
    setBusy(true);
    try {
      let cancelled = 0;
      const refused: string[] = [];
      // One request takes 500 jobs at most.
      for (let first = 0; first < ids.length; first += 500) {
        const json: Schemas['CancelRequest'] = { ids: ids.slice(first, first + 500) };
        const answer = await request('/v1/jobs:cancel', { method: 'POST', json });
        for (const item of ((await answer.json()) as Schemas['CancelResults']).items) {
          if (item.problem) refused.push(`${item.job_id}: ${item.problem}`);
          else cancelled += 1;
        }
      }
      toast(`${cancelled} ${cancelled === 1 ? 'job is' : 'jobs are'} being cancelled`);
      if (refused.length > 0)
        toast(`${refused.length} could not be cancelled: ${refused[0]}`, 'bad');
      props.onDone();
    } catch (error) {
      toastError(error);
    } finally {
      setBusy(false);
      setAsking(false);
    }
  }

  return (
    <div className="selection" role="status">
      <strong>{props.picked.size} selected</strong>
      <button
        type="button"
        className="button small"
        disabled={props.picked.size < 2 || props.picked.size > 20}
        title="From 2 to 20 jobs"
        onClick={() =>
          void navigate({
            to: '/compare',
            search: { jobs: [...props.picked].join(',') },
          })
        }
      >
        Compare
      </button>
      <button
        type="button"
        className="button danger small"
        disabled={ids.length === 0 || !mayWrite}
        title={mayWrite ? undefined : 'This needs a key with the scope jobs:write'}
        onClick={() => setAsking(true)}
      >
        Cancel {ids.length} unfinished
      </button>
      <button type="button" className="button quiet small" onClick={props.onDone}>
        Clear the selection
      </button>
      {asking && (
        <ConfirmDialog
          title={`Cancel ${ids.length} ${ids.length === 1 ? 'job' : 'jobs'}?`}
          confirm="Cancel them"
          busy={busy}
          onConfirm={() => void cancel()}
          onClose={() => setAsking(false)}
        >
          Running ones save a checkpoint and free their GPUs. A cancelled job does not run again,
          but can be cloned.
        </ConfirmDialog>
      )}
    </div>
  );
}
