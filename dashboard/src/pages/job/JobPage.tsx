import { useNavigate, useParams, useSearch } from '@tanstack/react-router';
import { type ComponentType, lazy, Suspense, useEffect } from 'react';
import { Ago } from '~/components/Ago';
import { Page, Tile } from '~/components/Page';
import { ProgressBar } from '~/components/Progress';
import { StatusBadge } from '~/components/StatusBadge';
import { ErrorState, Loading } from '~/components/states';
import { counted, formatBytes, formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration, secondsSince } from '~/format/times';
import { JobActions } from './JobActions';
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

export default function JobPage() {
  const { jobId } = useParams({ strict: false }) as { jobId: string };
  const { tab = 'charts' } = useSearch({ strict: false }) as { tab?: string };
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
  if (!job) {
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
          <h1>{name}</h1>
          <div className="row job-facts">
            <StatusBadge status={job.status} reason={job.reason} />
            <code>{job.id}</code>
            <span className="muted">
              {job.owner}, created <Ago time={job.created_at} /> ago
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
              const by = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
              if (by === 0) return;
              const next = IDS[(IDS.indexOf(id) + by + IDS.length) % IDS.length] ?? id;
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

function Tiles({ job }: { job: Job }) {
  const { step, total_steps, tokens, eta_seconds } = job.progress;
  const latest = job.latest_metrics;
  const attempt = job.attempts.at(-1);
  const gap = latest['parity/gap'];
  const running = secondsSince(
    job.started_at,
    job.ended_at ? Date.parse(job.ended_at) : Date.now(),
  );
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
          note={`reference ${formatNumber(latest['parity/reference_loss'])}`}
        />
      )}
      <Tile label="Tokens/s" value={formatCompact(latest['perf/tokens_per_second'])} />
      <Tile label="Peak memory" value={formatBytes(latest['memory/peak_bytes'])} />
      <Tile
        label="Time"
        value={formatDuration(running)}
        note={job.restarts > 0 ? counted(job.restarts, 'restart') : undefined}
      />
      <Tile
        label="Runs on"
        value={job.device === 'cuda' ? 'GPU' : (job.device?.toUpperCase() ?? '–')}
        note={
          attempt
            ? `${attempt.node}${job.is_final || !attempt.phase ? '' : `, ${attempt.phase}`}`
            : 'no node yet'
        }
      />
    </div>
  );
}
