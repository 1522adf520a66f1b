import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useScope, useSession } from '~/app/session';
import { FormDialog } from '~/components/Dialog';
import { Card, Field, Page } from '~/components/Page';
import { ErrorState, Loading } from '~/components/states';
import { type ColumnDef, Table } from '~/components/Table';
import { toast, toastError } from '~/components/Toast';
import { formatNumber } from '~/format/numbers';
import './usage.css';

type Usage = Schemas['UsageObject'];
type Quotas = Schemas['Quotas'];
type OwnerQuotas = Schemas['OwnerQuotas'];

/** What one's own jobs use and may use; for administrators, everybody's quotas as well. */
export default function UsagePage() {
  const admin = useScope('admin');
  const { data: session } = useSession();
  const usage = useQuery({
    queryKey: ['usage'],
    queryFn: async ({ signal }) => body(await client.GET('/v1/usage', { signal })),
    refetchInterval: 15_000,
  });
  return (
    <Page title="Usage">
      {usage.isPending ? (
        <Loading label="Reading the usage" />
      ) : usage.data === undefined ? (
        <ErrorState error={usage.error} onRetry={() => void usage.refetch()} />
      ) : (
        <OwnUsage usage={usage.data} owner={session?.owner ?? usage.data.owner} />
      )}
      {admin && <QuotaTable />}
    </Page>
  );
}

function OwnUsage({ usage, owner }: { usage: Usage; owner: string }) {
  const { quotas } = usage;
  return (
    <Card title={`${owner}, now and in the last ${usage.window_days} days`}>
      <div className="usage-grid">
        <Share label="Jobs in the queue" used={usage.queued} most={quotas.queued} />
        <Share label="Jobs on nodes" used={usage.running} most={quotas.running} />
        <Share label="GPU-hours" used={usage.gpu_hours} most={quotas.gpu_hours} />
        <Share label="CPU-slot-hours" used={usage.cpu_hours} most={null} note="not limited" />
        <Share label="Runs that have ended" used={usage.attempts} most={null} note="of all jobs" />
      </div>
    </Card>
  );
}

function Share(props: {
  label: string;
  used: number;
  most: number | null | undefined;
  note?: string;
}) {
  const limited = props.most !== null && props.most !== undefined;
  return (
    <div className="share">
      <span className="tile-label">{props.label}</span>
      <span className="tile-value">
        {formatNumber(Number(props.used.toFixed(2)))}
        {limited && <span className="muted"> of {formatNumber(props.most)}</span>}
      </span>
      {limited ? (
        <meter
          min={0}
          max={Math.max(Number(props.most), 1e-9)}
          value={props.used}
          aria-label={`${props.label}: share of the quota`}
        />
      ) : (
        <span className="hint">{props.note ?? 'no quota'}</span>
      )}
    </div>
  );
}

function QuotaTable() {
  const queries = useQueryClient();
  const [editing, setEditing] = useState<OwnerQuotas | null>(null);
  const quotas = useQuery({
    queryKey: ['quotas'],
    queryFn: async ({ signal }) => body(await client.GET('/v1/quotas', { signal })),
  });
  const remove = useMutation({
    mutationFn: async (owner: string) =>
      body(await client.DELETE('/v1/quotas/{owner}', { params: { path: { owner } } })),
    onSuccess: (_, owner) => {
      toast(`${owner} has everybody's quotas again`);
      void queries.invalidateQueries({ queryKey: ['quotas'] });
    },
    onError: toastError,
  });
  const columns: ColumnDef<OwnerQuotas, unknown>[] = [
    { header: 'Owner', accessorKey: 'owner' },
    limitColumn('In the queue', 'queued'),
    limitColumn('On nodes', 'running'),
    limitColumn('GPU-hours', 'gpu_hours'),
    {
      id: 'actions',
      header: () => <span className="visually-hidden">Actions</span>,
      enableSorting: false,
      cell: ({ row: { original } }) => (
        <span className="nowrap">
          <button
            type="button"
            className="button quiet small"
            aria-label={`Change the quotas of ${original.owner}`}
            onClick={() => setEditing(original)}
          >
            Change
          </button>
          <button
            type="button"
            className="button quiet small"
            aria-label={`Take the own quotas of ${original.owner} away`}
            disabled={remove.isPending}
            onClick={() => remove.mutate(original.owner)}
          >
            Back to everybody's
          </button>
        </span>
      ),
    },
  ];
  return (
    <Card
      title="Quotas"
      actions={
        <button
          type="button"
          className="button small"
          onClick={() => setEditing({ owner: '', queued: null, running: null, gpu_hours: null })}
        >
          Quotas for an owner
        </button>
      }
    >
      {quotas.isPending ? (
        <Loading label="Reading the quotas" />
      ) : quotas.data === undefined ? (
        <ErrorState error={quotas.error} onRetry={() => void quotas.refetch()} />
      ) : (
        <>
          <p className="muted quota-default">Everybody: {told(quotas.data.default)}</p>
          {quotas.data.items.length === 0 ? (
            <p className="muted">No owner has quotas of their own.</p>
          ) : (
            <Table
              label="Owners with quotas of their own"
              rows={quotas.data.items}
              columns={columns}
              rowId={(row) => row.owner}
            />
          )}
        </>
      )}
      {editing && <QuotaDialog of={editing} onClose={() => setEditing(null)} />}
    </Card>
  );
}

function limitColumn(header: string, key: keyof Quotas): ColumnDef<OwnerQuotas, unknown> {
  return {
    header,
    accessorKey: key,
    cell: ({ row }) => {
      const value = row.original[key];
      return value === null || value === undefined ? (
        <span className="muted">no limit</span>
      ) : (
        formatNumber(value)
      );
    },
  };
}

function told(quotas: Quotas): string {
  const one = (value: number | null | undefined, what: string) =>
    value === null || value === undefined
      ? `no limit of ${what}`
      : `${formatNumber(value)} ${what}`;
  return [
    one(quotas.queued, 'jobs in the queue'),
    one(quotas.running, 'jobs on nodes'),
    one(quotas.gpu_hours, 'GPU-hours'),
  ].join(', ');
}

function QuotaDialog({ of: before, onClose }: { of: OwnerQuotas; onClose: () => void }) {
  const queries = useQueryClient();
  const [owner, setOwner] = useState(before.owner);
  const [texts, setTexts] = useState({
    queued: before.queued?.toString() ?? '',
    running: before.running?.toString() ?? '',
    gpu_hours: before.gpu_hours?.toString() ?? '',
  });
  const save = useMutation({
    mutationFn: async () => {
      const number = (text: string) => (text.trim() === '' ? null : Number(text));
      const quotas = {
        queued: number(texts.queued),
        running: number(texts.running),
        gpu_hours: number(texts.gpu_hours),
      };
      return body(
        await client.PUT('/v1/quotas/{owner}', { params: { path: { owner } }, body: quotas }),
      );
    },
    onSuccess: () => {
      toast(`The quotas of ${owner} are set`);
      void queries.invalidateQueries({ queryKey: ['quotas'] });
      void queries.invalidateQueries({ queryKey: ['usage'] });
      onClose();
    },
  });
  const field = (name: keyof typeof texts, label: string) => (
    <Field label={label} hint="Empty: no limit.">
      <input
        className="input"
        inputMode="decimal"
        value={texts[name]}
        onChange={(event) => setTexts({ ...texts, [name]: event.target.value })}
      />
    </Field>
  );
  return (
    <FormDialog
      title={before.owner ? `Quotas of ${before.owner}` : 'Quotas for an owner'}
      submit="Set"
      disabled={save.isPending || owner === ''}
      onSubmit={() => save.mutate()}
      onClose={onClose}
      error={save.error}
    >
      {!before.owner && (
        <Field label="Owner">
          <input
            className="input"
            value={owner}
            onChange={(event) => setOwner(event.target.value)}
          />
        </Field>
      )}
      {field('queued', 'Jobs in the queue')}
      {field('running', 'Jobs on nodes')}
      {field('gpu_hours', 'GPU-hours in the window')}
    </FormDialog>
  );
}
