import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { Ago } from '~/components/Ago';
import { Dialog } from '~/components/Dialog';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { type ColumnDef, Table } from '~/components/Table';
import { toast, toastError } from '~/components/Toast';
import { formatTime } from '~/format/times';

type Delivery = Schemas['DeliveryObject'];

const TONES = { pending: 'waiting', delivered: 'good', failed: 'bad' } as const;

/** The newest messages of one webhook, and what came of each. */
export function Deliveries({ webhook }: { webhook: string }) {
  const [shown, setShown] = useState<string | null>(null);
  const query = useQuery({
    queryKey: ['deliveries', webhook],
    refetchInterval: 3000,
    queryFn: async ({ signal }) => {
      const params = { path: { webhook_id: webhook }, query: { limit: 50 } };
      return body(await client.GET('/v1/webhooks/{webhook_id}/deliveries', { params, signal }))
        .items;
    },
  });
  if (query.isPending) return <Loading label="Reading the deliveries" />;
  if (query.data === undefined)
    return <ErrorState error={query.error} onRetry={() => void query.refetch()} />;
  if (query.data.length === 0)
    return (
      <EmptyState title="Nothing was sent yet">
        Send a test call, or wait for a job to change.
      </EmptyState>
    );
  return (
    <div className="deliveries">
      <Table
        label="Deliveries"
        rows={query.data}
        columns={columnsOf(setShown)}
        rowId={(delivery) => delivery.id}
      />
      {shown && (
        <DeliveryDialog webhook={webhook} delivery={shown} onClose={() => setShown(null)} />
      )}
    </div>
  );
}

function columnsOf(show: (delivery: string) => void): ColumnDef<Delivery, unknown>[] {
  return [
    {
      header: 'Made',
      accessorKey: 'created_at',
      cell: ({ row }) => (
        <>
          <Ago time={row.original.created_at} /> ago
        </>
      ),
    },
    { header: 'Event', accessorKey: 'type', cell: ({ row }) => <code>{row.original.type}</code> },
    {
      header: 'State',
      accessorKey: 'status',
      cell: ({ row: { original: delivery } }) => (
        <span className={`badge ${TONES[delivery.status]}`}>
          <span className="dot" aria-hidden="true" />
          {delivery.status}
        </span>
      ),
    },
    {
      header: 'Last answer',
      id: 'answer',
      enableSorting: false,
      cell: ({ row }) => {
        const last = row.original.attempts.at(-1);
        if (!last) return <span className="muted">not tried yet</span>;
        return last.status_code ?? last.error ?? '–';
      },
    },
    { header: 'Attempts', accessorKey: 'attempt_count' },
    {
      id: 'actions',
      header: () => <span className="visually-hidden">Actions</span>,
      enableSorting: false,
      cell: ({ row: { original: delivery } }) => (
        <button type="button" className="button quiet small" onClick={() => show(delivery.id)}>
          Look
        </button>
      ),
    },
  ];
}

function DeliveryDialog(props: { webhook: string; delivery: string; onClose: () => void }) {
  const queries = useQueryClient();
  const params = { path: { webhook_id: props.webhook, delivery_id: props.delivery } };
  const key = ['deliveries', props.webhook, props.delivery];
  const query = useQuery({
    queryKey: key,
    refetchInterval: 3000,
    queryFn: async ({ signal }) =>
      body(
        await client.GET('/v1/webhooks/{webhook_id}/deliveries/{delivery_id}', { params, signal }),
      ),
  });
  const again = useMutation({
    mutationFn: async () =>
      body(
        await client.POST('/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver', {
          params,
        }),
      ),
    onSuccess: (delivery) => {
      queries.setQueryData(key, delivery);
      void queries.invalidateQueries({ queryKey: ['deliveries', props.webhook] });
      toast('It is sent again');
    },
    onError: toastError,
  });
  const delivery = query.data;
  return (
    <Dialog
      wide
      title={delivery ? delivery.type : 'Delivery'}
      onClose={props.onClose}
      actions={
        <>
          <button
            type="button"
            className="button"
            disabled={again.isPending || delivery?.status === 'pending'}
            onClick={() => again.mutate()}
          >
            Send it again
          </button>
          <button type="button" className="button primary" onClick={props.onClose}>
            Close
          </button>
        </>
      }
    >
      {query.isPending && <Loading label="Reading the delivery" />}
      {query.isError && <ErrorState error={query.error} />}
      {delivery && (
        <>
          <p className="muted">
            {delivery.message_id} · {delivery.status}
            {delivery.detail ? `: ${delivery.detail}` : ''}
            {delivery.next_attempt_at
              ? ` · next attempt ${formatTime(delivery.next_attempt_at)}`
              : ''}
          </p>
          <ol className="attempts">
            {delivery.attempts.map((attempt) => (
              <li key={attempt.number}>
                {formatTime(attempt.started_at)}:{' '}
                {attempt.status_code ?? attempt.error ?? 'no answer'} after {attempt.duration_ms} ms
                {attempt.response_excerpt && (
                  <pre className="excerpt">{attempt.response_excerpt}</pre>
                )}
              </li>
            ))}
          </ol>
          <pre className="excerpt">{JSON.stringify(delivery.payload, null, 2)}</pre>
        </>
      )}
    </Dialog>
  );
}
