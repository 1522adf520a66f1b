import { useInfiniteQuery, useMutation, useQueryClient } from '@tanstack/react-query';
import { useNavigate, useSearch } from '@tanstack/react-router';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useScope } from '~/app/session';
import { Ago } from '~/components/Ago';
import { ConfirmDialog } from '~/components/Dialog';
import { Card, Page } from '~/components/Page';
import { SecretDialog } from '~/components/SecretDialog';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { toast, toastError } from '~/components/Toast';
import { formatTime } from '~/format/times';
import '~/styles/forms.css';
import { CreateWebhookDialog } from './CreateWebhookDialog';
import { Deliveries } from './Deliveries';
import './webhooks.css';

type Webhook = Schemas['WebhookObject'];
type NewWebhook = Schemas['NewWebhookObject'];

/** Signed messages to servers of one's own when jobs change: the endpoints, and what reached them. */
export default function WebhooksPage() {
  const mayWrite = useScope('jobs:write');
  const { webhook: chosen } = useSearch({ strict: false }) as { webhook?: string };
  const [creating, setCreating] = useState(false);
  const [shown, setShown] = useState<NewWebhook | null>(null);
  const webhooks = useInfiniteQuery({
    queryKey: ['webhooks'],
    enabled: mayWrite,
    initialPageParam: undefined as string | undefined,
    refetchInterval: 15_000,
    queryFn: async ({ signal, pageParam }) => {
      const query = { limit: 100, ...(pageParam ? { cursor: pageParam } : {}) };
      return body(await client.GET('/v1/webhooks', { params: { query }, signal }));
    },
    getNextPageParam: (page) => page.next_cursor ?? undefined,
  });
  if (!mayWrite) {
    return (
      <Page title="Webhooks">
        <EmptyState title="This key may not see webhooks">
          Sign in with a key that has the scope jobs:write.
        </EmptyState>
      </Page>
    );
  }
  const rows = webhooks.data?.pages.flatMap((page) => page.items) ?? [];
  return (
    <Page
      title="Webhooks"
      actions={
        <button type="button" className="button primary" onClick={() => setCreating(true)}>
          New webhook
        </button>
      }
    >
      {webhooks.isPending ? (
        <Loading label="Reading the webhooks" />
      ) : webhooks.data === undefined ? (
        <ErrorState error={webhooks.error} onRetry={() => void webhooks.refetch()} />
      ) : rows.length === 0 ? (
        <EmptyState title="No webhook yet">
          A webhook sends a signed message to a server of yours whenever a job of yours changes: to
          a chat, a tracker, or whatever starts the next step.
        </EmptyState>
      ) : (
        <div className="webhook-list">
          {rows.map((webhook) => (
            <WebhookCard
              key={webhook.id}
              webhook={webhook}
              open={webhook.id === chosen}
              onSecret={setShown}
            />
          ))}
        </div>
      )}
      {webhooks.hasNextPage && (
        <button type="button" className="button" onClick={() => void webhooks.fetchNextPage()}>
          More
        </button>
      )}
      {creating && (
        <CreateWebhookDialog
          onClose={() => setCreating(false)}
          onCreated={(webhook) => {
            setCreating(false);
            setShown(webhook);
          }}
        />
      )}
      {shown && (
        <SecretDialog
          title="The signing secret"
          secret={shown.secret}
          copy="Copy the secret"
          onClose={() => setShown(null)}
        >
          Your server verifies each message with it (Standard Webhooks). This is the only time it is
          shown.
          {shown.old_secret_until &&
            ` Messages are signed with the former one as well until ${formatTime(shown.old_secret_until)}.`}
        </SecretDialog>
      )}
    </Page>
  );
}

function stateOf(webhook: Webhook): { tone: string; text: string } {
  if (webhook.disabled_at) return { tone: 'bad', text: 'stopped by the service' };
  if (!webhook.active) return { tone: 'idle', text: 'switched off' };
  if (webhook.failing_since) return { tone: 'waiting', text: 'failing' };
  return { tone: 'good', text: 'active' };
}

function WebhookCard(props: {
  webhook: Webhook;
  open: boolean;
  onSecret: (webhook: NewWebhook) => void;
}) {
  const { webhook } = props;
  const state = stateOf(webhook);
  const navigate = useNavigate();
  const labels = Object.entries(webhook.labels);
  return (
    <Card
      title={
        <span className="webhook-head">
          <span className="webhook-url">{webhook.url}</span>
          <span className={`badge ${state.tone}`}>
            <span className="dot" aria-hidden="true" />
            {state.text}
          </span>
        </span>
      }
      actions={<WebhookActions webhook={webhook} onSecret={props.onSecret} />}
    >
      {webhook.description && <p>{webhook.description}</p>}
      <p className="muted">
        {webhook.events.join(', ')}
        {labels.length > 0 &&
          ` of jobs with ${labels.map(([name, value]) => `${name}=${value}`).join(', ')}`}{' '}
        · last success{' '}
        {webhook.last_success_at ? (
          <>
            <Ago time={webhook.last_success_at} /> ago
          </>
        ) : (
          'never'
        )}
      </p>
      {webhook.disabled_at && (
        <p className="form-error">
          Stopped <Ago time={webhook.disabled_at} /> ago: {webhook.disabled_reason}. Mend the
          server, then switch it on again.
        </p>
      )}
      {!webhook.disabled_at && webhook.failing_since && (
        <p className="form-error">
          It has taken nothing for <Ago time={webhook.failing_since} /> ({webhook.failures}{' '}
          attempts); it is tried again by itself.
        </p>
      )}
      <button
        type="button"
        className="button small"
        aria-expanded={props.open}
        onClick={() =>
          void navigate({
            to: '/webhooks',
            search: props.open ? {} : { webhook: webhook.id },
            replace: true,
          })
        }
      >
        {props.open ? 'Hide the deliveries' : 'Deliveries'}
      </button>
      {props.open && <Deliveries webhook={webhook.id} />}
    </Card>
  );
}

function WebhookActions({
  webhook,
  onSecret,
}: {
  webhook: Webhook;
  onSecret: (webhook: NewWebhook) => void;
}) {
  const queries = useQueryClient();
  const [asked, setAsked] = useState<'rotate' | 'delete' | null>(null);
  const params = { path: { webhook_id: webhook.id } };
  const refresh = () => {
    setAsked(null);
    void queries.invalidateQueries({ queryKey: ['webhooks'] });
    void queries.invalidateQueries({ queryKey: ['deliveries', webhook.id] });
  };
  const test = useMutation({
    mutationFn: async () => body(await client.POST('/v1/webhooks/{webhook_id}/test', { params })),
    onSuccess: () => {
      toast('A test call is on its way: see the deliveries');
      refresh();
    },
    onError: toastError,
  });
  const change = useMutation({
    mutationFn: async (active: boolean) =>
      body(await client.PATCH('/v1/webhooks/{webhook_id}', { params, body: { active } })),
    onSuccess: (changed) => {
      toast(changed.active ? 'It is switched on' : 'It is switched off');
      refresh();
    },
    onError: toastError,
  });
  const rotate = useMutation({
    mutationFn: async () => body(await client.POST('/v1/webhooks/{webhook_id}/rotate', { params })),
    onSuccess: (changed) => {
      refresh();
      onSecret(changed);
    },
    onError: toastError,
  });
  const remove = useMutation({
    mutationFn: async () => {
      await client.DELETE('/v1/webhooks/{webhook_id}', { params });
    },
    onSuccess: () => {
      toast('The webhook is deleted');
      refresh();
    },
    onError: toastError,
  });
  const on = webhook.active && webhook.disabled_at === null;
  return (
    <>
      <button
        type="button"
        className="button small"
        disabled={!on || test.isPending}
        onClick={() => test.mutate()}
      >
        Test
      </button>
      <button
        type="button"
        className="button small"
        disabled={change.isPending}
        onClick={() => change.mutate(!on)}
      >
        {on ? 'Switch off' : 'Switch on'}
      </button>
      <button type="button" className="button small" onClick={() => setAsked('rotate')}>
        New secret
      </button>
      <button type="button" className="button small danger" onClick={() => setAsked('delete')}>
        Delete
      </button>
      {asked === 'rotate' && (
        <ConfirmDialog
          title="Make a new signing secret?"
          confirm="Make it"
          busy={rotate.isPending}
          onClose={() => setAsked(null)}
          onConfirm={() => rotate.mutate()}
        >
          For a time messages are signed with both, so that your server can be changed without
          losing any.
        </ConfirmDialog>
      )}
      {asked === 'delete' && (
        <ConfirmDialog
          title="Delete this webhook?"
          confirm="Delete it"
          busy={remove.isPending}
          onClose={() => setAsked(null)}
          onConfirm={() => remove.mutate()}
        >
          Nothing is sent to <code>{webhook.url}</code> any more, and its deliveries are forgotten.
        </ConfirmDialog>
      )}
    </>
  );
}
