import { useInfiniteQuery } from '@tanstack/react-query';
import { useMemo, useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useScope } from '~/app/session';
import { Ago } from '~/components/Ago';
import { Card, Page } from '~/components/Page';
import { SecretDialog } from '~/components/SecretDialog';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { type ColumnDef, Table } from '~/components/Table';
import { formatTime } from '~/format/times';
import '~/styles/forms.css';
import { CreateKeyDialog } from './CreateKeyDialog';
import { ExpiryDialog, RevokeDialog, RotateDialog } from './KeyDialogs';

type Key = Schemas['KeyObject'];
type NewKey = Schemas['NewKeyObject'];
type Asked = { action: 'rotate' | 'revoke' | 'expire'; key: Key };

function stateOf(key: Key): { tone: string; text: string } {
  if (key.revoked_at) return { tone: 'bad', text: 'revoked' };
  if (key.expires_at && Date.parse(key.expires_at) <= Date.now())
    return { tone: 'idle', text: 'expired' };
  return { tone: 'good', text: 'valid' };
}

/** API keys, for administrators. A secret is seen once, when it is made. */
export default function KeysPage() {
  const admin = useScope('admin');
  const [withRevoked, setWithRevoked] = useState(false);
  const [creating, setCreating] = useState(false);
  const [asked, setAsked] = useState<Asked | null>(null);
  const [shown, setShown] = useState<NewKey | null>(null);
  const keys = useInfiniteQuery({
    queryKey: ['keys', withRevoked],
    enabled: admin,
    initialPageParam: undefined as string | undefined,
    queryFn: async ({ signal, pageParam }) => {
      const query = {
        revoked: withRevoked,
        limit: 200,
        ...(pageParam ? { cursor: pageParam } : {}),
      };
      return body(await client.GET('/v1/keys', { params: { query }, signal }));
    },
    getNextPageParam: (page) => page.next_cursor ?? undefined,
  });
  const rows = useMemo(() => keys.data?.pages.flatMap((page) => page.items) ?? [], [keys.data]);
  const columns = useMemo(() => columnsOf(setAsked), []);
  if (!admin) {
    return (
      <Page title="Keys">
        <EmptyState title="Keys are an administrator's">
          Sign in with a key that has the scope admin.
        </EmptyState>
      </Page>
    );
  }
  return (
    <Page
      title="Keys"
      actions={
        <>
          <label className="check">
            <input
              type="checkbox"
              checked={withRevoked}
              onChange={(event) => setWithRevoked(event.target.checked)}
            />
            Revoked ones too
          </label>
          <button type="button" className="button primary" onClick={() => setCreating(true)}>
            New key
          </button>
        </>
      }
    >
      {keys.isPending ? (
        <Loading label="Reading the keys" />
      ) : keys.data === undefined ? (
        <ErrorState error={keys.error} onRetry={() => void keys.refetch()} />
      ) : (
        <Card>
          <Table label="Keys" rows={rows} columns={columns} rowId={(key) => key.id} />
          {keys.hasNextPage && (
            <button
              type="button"
              className="button"
              disabled={keys.isFetching}
              onClick={() => void keys.fetchNextPage()}
            >
              More
            </button>
          )}
        </Card>
      )}
      {creating && (
        <CreateKeyDialog
          onClose={() => setCreating(false)}
          onCreated={(key) => {
            setCreating(false);
            setShown(key);
          }}
        />
      )}
      {asked?.action === 'rotate' && (
        <RotateDialog
          of={asked.key}
          onClose={() => setAsked(null)}
          onRotated={(key) => {
            setAsked(null);
            setShown(key);
          }}
        />
      )}
      {asked?.action === 'revoke' && <RevokeDialog of={asked.key} onClose={() => setAsked(null)} />}
      {asked?.action === 'expire' && <ExpiryDialog of={asked.key} onClose={() => setAsked(null)} />}
      {shown && (
        <SecretDialog
          title={`The secret of ${shown.name}`}
          secret={shown.key}
          copy="Copy the key"
          onClose={() => setShown(null)}
        >
          This is the only time it is shown; the service keeps its hash alone.
        </SecretDialog>
      )}
    </Page>
  );
}

function columnsOf(ask: (asked: Asked) => void): ColumnDef<Key, unknown>[] {
  return [
    {
      header: 'Name',
      accessorKey: 'name',
      cell: ({ row: { original: key } }) => (
        <>
          <strong>{key.name}</strong>
          <br />
          <span className="muted mono">{key.id}</span>
        </>
      ),
    },
    { header: 'Owner', accessorKey: 'owner' },
    {
      header: 'May',
      id: 'scopes',
      accessorFn: (key) => key.scopes.join(' '),
      cell: ({ row: { original: key } }) => (
        <>
          {key.scopes.join(', ')}
          {key.node && <span className="muted"> · {key.node}</span>}
        </>
      ),
    },
    {
      header: 'State',
      id: 'state',
      accessorFn: (key) => stateOf(key).text,
      cell: ({ row: { original: key } }) => {
        const { tone, text } = stateOf(key);
        return (
          <span className={`badge ${tone}`}>
            <span className="dot" aria-hidden="true" />
            {text}
          </span>
        );
      },
    },
    {
      header: 'Ends',
      accessorKey: 'expires_at',
      cell: ({ row: { original: key } }) =>
        key.expires_at ? formatTime(key.expires_at) : <span className="muted">never</span>,
    },
    {
      header: 'Last used',
      accessorKey: 'last_used_at',
      cell: ({ row: { original: key } }) =>
        key.last_used_at ? (
          <>
            <Ago time={key.last_used_at} /> ago
          </>
        ) : (
          <span className="muted">never</span>
        ),
    },
    {
      id: 'actions',
      header: () => <span className="visually-hidden">Actions</span>,
      enableSorting: false,
      cell: ({ row: { original: key } }) =>
        key.revoked_at === null && (
          <span className="nowrap">
            {(['rotate', 'expire', 'revoke'] as const).map((action) => (
              <button
                key={action}
                type="button"
                className="button quiet small"
                aria-label={`${ACTIONS[action]} ${key.name}`}
                onClick={() => ask({ action, key })}
              >
                {ACTIONS[action]}
              </button>
            ))}
          </span>
        ),
    },
  ];
}

const ACTIONS = { rotate: 'Rotate', expire: 'Set end', revoke: 'Revoke' } as const;
