import { useNavigate, useParams, useSearch } from '@tanstack/react-router';
import { type ComponentType, lazy, Suspense, useEffect } from 'react';
import { ApiError } from '~/api/problem';
import { Ago } from '~/components/Ago';
import { Name } from '~/components/Name';
import { Page, Tile } from '~/components/Page';
import { ProgressBar } from '~/components/Progress';
import { StatusBadge } from '~/components/StatusBadge';
import { ErrorState, Loading } from '~/components/states';
import { counted, formatBytes, formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration } from '~/format/times';
import { JobActions } from './JobActions';
import { phaseOf, secondsAtWork } from './trained';
import { type Job, useJob } from './useJob';

interface Tab {
  label: string;
  load: () => Promise<{ default: ComponentType<{ job: Job }> }>;
}

const TABS: Record<string, Tab> = {
  charts: { label: 'Charts', load: () => import('./ChartsTab') },
  fp8: { label: 'FP8 health', load: () => import('./HealthTab') },
  timeline: { label: 'Timeline', load: () => import('./TimelineTab') },
  logs: { label: 'Logs', load: () => import('./LogsTab') },
  files: { label: 'Files', load: () => import('./FilesTab') },
  spec: { label: 'Spec', load: () => import('./SpecTab') },
};
const IDS = Object.keys(TABS);
const VIEWS = Object.fromEntries(
  Object.entries(TABS).map(([id, { load }]) => [id, lazy(load)] as const),
);

/** Another job is another page: nothing of the one before is shown, or zoomed to, under its name. */
export default function JobPage() {
  const { jobId } = useParams({ strict: false }) as { jobId: string };
  return <OneJob key={jobId} jobId={jobId} />;
}

function OneJob({ jobId }: { jobId: string }) {
  const search = useSearch({ strict: false }) as { tab?: string };
  const tab = search.tab !== undefined && IDS.includes(search.tab) ? search.tab : 'charts';
  const navigate = useNavigate();
  const query = useJob(jobId);
  const View = VIEWS[tab];
  // The view's code is on its way while the job is read.
  useEffect(() => void TABS[tab]?.load(), [tab]);
  const job = query.data;
  const ready = job !== undefined;
  // In a narrow window the tabs go beyond its edge, and an address may lead to the last of them.
  useEffect(() => {
    const chosen = ready ? document.getElementById(`tab-${tab}`) : null;
    const list = chosen?.parentElement;
    if (!chosen || !list) return;
    const [own, all] = [chosen.getBoundingClientRect(), list.getBoundingClientRect()];
    list.scrollLeft += own.left + own.width / 2 - (all.left + all.width / 2);
  }, [tab, ready]);
  const gone = query.error instanceof ApiError && query.error.status === 404;
  if (!job || gone) {
    return query.isError ? (
      <Page title="Job">
        <ErrorState error={query.error} onRetry={() => void query.refetch()} />
      </Page>
    ) : (
      <Loading label="Reading the job" />
    );
  }
  const name = job.name ?? job.id;
  const show = (next: string) =>
    void navigate({
      to: '.',
      search: (old) => ({ ...old, tab: next === 'charts' ? undefined : next }),
      // In a narrow window the tabs are far below the top.
      resetScroll: false,
    });
  return (
    <Page
      title={name}
      heading={
        <>
          <h1>
            <Name lines={3}>{name}</Name>
          </h1>
          <div className="row job-facts">
            <StatusBadge status={job.status} reason={job.reason} />
            <code>{job.id}</code>
            <span className="muted">
              <Name>{job.owner}</Name>, created <Ago time={job.created_at} /> ago
              {job.is_final ? '' : query.live ? ' · live' : ' · connecting…'}
            </span>
          </div>
        </>
      }
      actions={<JobActions job={job} />}
    >
      <Situation job={job} />
      <Tiles job={job} />
      <div className="tabs" role="tablist" aria-label="Views of the job">
        {Object.entries(TABS).map(([id, { label }]) => (
          <button
            key={id}
            type="button"
            role="tab"
            id={`tab-${id}`}
            aria-selected={tab === id}
            aria-controls="tab-panel"
            tabIndex={tab === id ? 0 : -1}
            onClick={() => show(id)}
            onKeyDown={(event) => {
              const at = {
                ArrowRight: IDS.indexOf(id) + 1,
                ArrowLeft: IDS.indexOf(id) - 1,
                Home: 0,
                End: -1,
              }[event.key];
              if (at === undefined) return;
              event.preventDefault();
              const next = IDS.at(at % IDS.length) ?? id;
              show(next);
              document.getElementById(`tab-${next}`)?.focus();
            }}
          >
            {label}
          </button>
        ))}
      </div>
      <div id="tab-panel" role="tabpanel" aria-labelledby={`tab-${tab}`} className="stack">
        <Suspense fallback={<Loading />}>{View && <View job={job} />}</Suspense>
      </div>
    </Page>
  );
}

/** What needs saying before any figure: why it waits, why it failed, what is wrong now. */
function Situation({ job }: { job: Job }) {
  const attempt = job.attempts.at(-1);
  const notes: { text: string; bad?: boolean }[] = [];
  if (job.status === 'queued') {
    const place =
      job.queue_position === null ? 'In the queue' : `Number ${job.queue_position} in the queue`;
    notes.push({ text: job.waiting_for ? `${place}; waits for ${job.waiting_for}.` : `${place}.` });
  }
  if (job.status === 'failed' && job.detail) notes.push({ text: job.detail, bad: true });
  // What the status says already is no news.
  else if (job.detail && job.detail !== job.status && job.reason !== 'completed')
    notes.push({ text: job.detail });
  if (attempt && !job.is_final) {
    if (attempt.unreachable_since) {
      notes.push({
        text: `Its node ${attempt.node} cannot be reached; training may go on there.`,
        bad: true,
      });
    }
    if (attempt.stalled_since)
      notes.push({ text: 'There was no step for longer than there may be.', bad: true });
  }
  if (notes.length === 0) return null;
  return (
    <div className="stack tight">
      {notes.map(({ text, bad }) => (
        <p key={text} className={bad ? 'note bad' : 'note'}>
          {text}
        </p>
      ))}
    </div>
  );
}

/** How far the comparison went: the newest figures of it may be old ones. */
function comparedOf(job: Job): string {
  const { parity } = job.spec.training as { parity?: { steps?: number } | null };
  const last = Math.min(parity?.steps ?? job.progress.step, job.progress.step);
  return last < job.progress.step
    ? `both at step ${last.toLocaleString('en-US')}`
    : 'at the newest step';
}

function Tiles({ job }: { job: Job }) {
  const { step, total_steps, tokens, eta_seconds } = job.progress;
  const latest = job.latest_metrics;
  const attempt = job.attempts.at(-1);
  const gap = latest['parity/gap'];
  const phase = phaseOf(job.attempts);
  return (
    <div className="tiles">
      <div className="tile">
        <span className="tile-label">Progress</span>
        <span className="tile-value">
          {step.toLocaleString('en-US')}
          <span className="muted"> / {total_steps?.toLocaleString('en-US') ?? '?'}</span>
        </span>
        <ProgressBar step={step} total={total_steps} label="Steps done" />
        <span className="tile-note">
          {job.status === 'running' && eta_seconds !== null
            ? `${formatDuration(eta_seconds)} left`
            : `${formatCompact(tokens)} tokens`}
        </span>
      </div>
      <Tile
        label="Loss"
        value={formatNumber(latest['train/loss'])}
        note={
          latest['eval/loss'] !== undefined
            ? `evaluation ${formatNumber(latest['eval/loss'])}`
            : undefined
        }
      />
      {gap !== undefined && (
        <Tile
          label="Gap to the reference"
          value={`${formatNumber(Number(gap) * 100, 3)} %`}
          note={`reference ${formatNumber(latest['parity/reference_loss'])}, ${comparedOf(job)}`}
        />
      )}
      <Tile label="Tokens/s" value={formatCompact(latest['perf/tokens_per_second'])} />
      <Tile label="Peak memory" value={formatBytes(latest['memory/peak_bytes'])} />
      <Tile
        label="Time at work"
        value={formatDuration(secondsAtWork(job.attempts))}
        note={job.restarts > 0 ? counted(job.restarts, 'restart') : undefined}
      />
      <Tile
        label="Runs on"
        value={job.device === 'cuda' ? 'GPU' : (job.device?.toUpperCase() ?? '–')}
        note={attempt ? `${attempt.node}${phase === null ? '' : `, ${phase}`}` : 'no node yet'}
      />
    </div>
  );
}
