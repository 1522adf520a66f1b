import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query';
import { Link } from '@tanstack/react-router';
import { useMemo, useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useScope } from '~/app/session';
import { Ago } from '~/components/Ago';
import { ConfirmDialog } from '~/components/Dialog';
import { Name } from '~/components/Name';
import { Card, Page } from '~/components/Page';
import { StatusBadge } from '~/components/StatusBadge';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { toast, toastError } from '~/components/Toast';
import { formatBytes, formatPercent } from '~/format/numbers';
import { byNode, type PlacedJob, usePlacedJobs } from './jobsOnNodes';
import './nodes.css';

type Node = Schemas['NodeObject'];
const NO_JOBS: PlacedJob[] = [];

interface Gpu {
  index: number;
  name?: string;
  memory_bytes?: number;
}

/** The machines that train: how they are, what is on them, and what administrators do to them. */
export default function NodesPage() {
  const nodes = useQuery({
    queryKey: ['nodes'],
    queryFn: async ({ signal }) => body(await client.GET('/v1/nodes', { signal })).items,
    refetchInterval: 5000,
  });
  const jobs = usePlacedJobs();
  const placed = useMemo(() => byNode(jobs.data ?? []), [jobs.data]);
  return (
    <Page title="Nodes">
      {nodes.isPending ? (
        <Loading label="Reading the nodes" />
      ) : nodes.data === undefined ? (
        <ErrorState error={nodes.error} onRetry={() => void nodes.refetch()} />
      ) : nodes.data.length === 0 ? (
        <EmptyState title="No node is registered">
          Make a token with <code>octrain nodes</code> or <code>POST /nodes/tokens</code>, and start{' '}
          <code>python -m octrain_worker run</code> on the machine. Jobs that are submitted wait
          until then.
        </EmptyState>
      ) : (
        <div className="node-grid">
          {nodes.data.map((node) => (
            <NodeCard key={node.id} node={node} jobs={placed.get(node.name) ?? NO_JOBS} />
          ))}
        </div>
      )}
    </Page>
  );
}

function stateOf(node: Node): { tone: string; text: string } {
  if (node.quarantined_since) return { tone: 'bad', text: 'set aside' };
  if (!node.live) return { tone: 'bad', text: 'not heard' };
  if (node.wanted === 'drain') return { tone: 'waiting', text: 'draining' };
  return { tone: 'good', text: 'ready' };
}

function NodeCard({ node, jobs }: { node: Node; jobs: PlacedJob[] }) {
  const admin = useScope('admin');
  const state = stateOf(node);
  const gpus = node.gpus as unknown as Gpu[];
  return (
    <Card
      title={
        <span className="node-name">
          {node.name}
          <span className={`badge ${state.tone}`}>
            <span className="dot" aria-hidden="true" />
            {state.text}
          </span>
        </span>
      }
      actions={admin && <NodeActions node={node} jobs={jobs.length} />}
    >
      {node.quarantine_detail && (
        <p className="node-note bad">
          Set aside <Ago time={node.quarantined_since} /> ago: {node.quarantine_detail}
        </p>
      )}
      {!node.live && (
        <p className="node-note">
          Last heard <Ago time={node.last_heartbeat_at} /> ago. Its jobs go on there; they are
          placed anew once their leases end.
        </p>
      )}
      <dl className="node-facts">
        <Fact name="Host">{node.hostname}</Fact>
        <Fact name="Version">{node.version}</Fact>
        {node.cpu_slots > 0 && (
          <Fact name="CPU slots">
            {node.cpu_slots_used} of {node.cpu_slots} in use
          </Fact>
        )}
        <Fact name="Last heard">
          <Ago time={node.last_heartbeat_at} /> ago
        </Fact>
        {node.private_roots && <Fact name="Files">its own: jobs restart on this node only</Fact>}
      </dl>
      <Use node={node} gpus={gpus} />
      <h3>Engines</h3>
      <ul className="engines">
        {Object.entries(node.engines).map(([name, engine]) => (
          <li key={name} title={(engine.reasons ?? []).join('; ') || undefined}>
            <span className={`badge ${engine.ok ? 'good' : 'idle'}`}>
              <span aria-hidden="true">{engine.ok ? '✓' : '×'}</span> {name}
              {engine.version ? ` ${engine.version}` : ''}
            </span>
            {!engine.ok && (
              <span className="hint">
                {(engine.reasons ?? []).join('; ') || 'does not work here'}
              </span>
            )}
          </li>
        ))}
      </ul>
      <h3>Jobs</h3>
      {jobs.length === 0 ? (
        <p className="muted">None of those you may see.</p>
      ) : (
        <ul className="node-jobs">
          {jobs.map((job) => (
            <li key={job.id}>
              <Link to="/jobs/$jobId" params={{ jobId: job.id }}>
                <Name>{job.name ?? job.id}</Name>
              </Link>
              <StatusBadge status={job.status} />
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function Fact({ name, children }: { name: string; children: React.ReactNode }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** The newest sample of the machine and of each GPU. */
function Use({ node, gpus }: { node: Node; gpus: Gpu[] }) {
  const { data } = useQuery({
    queryKey: ['node-metrics', node.id],
    enabled: node.live,
    refetchInterval: 10_000,
    queryFn: async ({ signal }) => {
      const params = { path: { node_id: node.id }, query: { seconds: 120, max_points: 20 } };
      return body(await client.GET('/v1/nodes/{node_id}/metrics', { params, signal }));
    },
  });
  const newest = data?.samples.at(-1);
  const host = newest?.host;
  return (
    <>
      {host && host.cpu_utilization != null && (
        <Meter label="Processors" share={host.cpu_utilization} />
      )}
      {gpus.map((gpu) => {
        const use = newest?.gpus.find((one) => one.index === gpu.index);
        const held = node.gpus_used.includes(gpu.index);
        const memory =
          use?.memory_bytes != null
            ? `${formatBytes(use.memory_bytes)} of ${formatBytes(gpu.memory_bytes)}`
            : formatBytes(gpu.memory_bytes);
        return (
          <Meter
            key={gpu.index}
            label={`GPU ${gpu.index}${gpu.name ? ` · ${gpu.name}` : ''} · ${memory} · ${held ? 'in use' : 'free'}`}
            share={use?.utilization ?? null}
          />
        );
      })}
    </>
  );
}

function Meter({ label, share }: { label: string; share: number | null }) {
  return (
    <div className="meter-row">
      <span>{label}</span>
      {share === null ? (
        <span className="muted">unknown</span>
      ) : (
        <>
          <meter min={0} max={1} value={share} aria-label={label} />
          <span className="number">{formatPercent(share, 2)}</span>
        </>
      )}
    </div>
  );
}

type Action = 'drain' | 'undrain' | 'release';

function NodeActions({ node, jobs }: { node: Node; jobs: number }) {
  const queries = useQueryClient();
  const [asked, setAsked] = useState(false);
  const act = useMutation({
    mutationFn: async (action: Action) => {
      const params = { path: { node_id: node.id } };
      if (action === 'drain')
        return body(await client.POST('/v1/nodes/{node_id}/drain', { params }));
      if (action === 'undrain')
        return body(await client.POST('/v1/nodes/{node_id}/undrain', { params }));
      return body(await client.POST('/v1/nodes/{node_id}/release', { params }));
    },
    onSuccess: (changed, action) => {
      queries.setQueryData<Node[]>(['nodes'], (before) =>
        before?.map((one) => (one.id === changed.id ? changed : one)),
      );
      setAsked(false);
      toast(DONE[action](node.name));
    },
    onError: toastError,
  });
  return (
    <>
      {node.quarantined_since && (
        <button
          type="button"
          className="button small"
          disabled={act.isPending}
          onClick={() => act.mutate('release')}
        >
          Give it jobs again
        </button>
      )}
      {node.wanted === 'drain' ? (
        <button
          type="button"
          className="button small"
          disabled={act.isPending}
          onClick={() => act.mutate('undrain')}
        >
          Stop draining
        </button>
      ) : (
        <button type="button" className="button small" onClick={() => setAsked(true)}>
          Drain
        </button>
      )}
      {asked && (
        <ConfirmDialog
          title={`Drain ${node.name}?`}
          confirm="Drain it"
          busy={act.isPending}
          onClose={() => setAsked(false)}
          onConfirm={() => act.mutate('drain')}
        >
          It is given no more jobs.{' '}
          {jobs > 0
            ? `The ${jobs === 1 ? 'job' : `${jobs} jobs`} on it go${jobs === 1 ? 'es' : ''} on to the end.`
            : 'Nothing runs on it that you may see.'}
        </ConfirmDialog>
      )}
    </>
  );
}

const DONE: Record<Action, (name: string) => string> = {
  drain: (name) => `${name} is given no more jobs`,
  undrain: (name) => `${name} takes jobs again`,
  release: (name) => `${name} is no longer set aside`,
};
