import { useMutation, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { ConfirmDialog, FormDialog } from '~/components/Dialog';
import { Field } from '~/components/Page';
import { toast, toastError } from '~/components/Toast';
import { formatTime } from '~/format/times';

type Key = Schemas['KeyObject'];
type NewKey = Schemas['NewKeyObject'];

function useChange<Input, Output>(
  change: (input: Input) => Promise<Output>,
  done: (output: Output) => void,
) {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: change,
    onSuccess: (output) => {
      void queries.invalidateQueries({ queryKey: ['keys'] });
      done(output);
    },
    onError: toastError,
  });
}

/** Asks before a key is refused for good. */
export function RevokeDialog({ of: key, onClose }: { of: Key; onClose: () => void }) {
  const revoke = useChange(
    async () =>
      body(await client.DELETE('/v1/keys/{key_id}', { params: { path: { key_id: key.id } } })),
    () => {
      toast(`${key.name} is revoked`);
      onClose();
    },
  );
  return (
    <ConfirmDialog
      title={`Revoke ${key.name}?`}
      confirm="Revoke it"
      busy={revoke.isPending}
      onClose={onClose}
      onConfirm={() => revoke.mutate(undefined)}
    >
      Everything that uses it is refused at once, and so are the browsers that signed in with it.
      This cannot be undone.
    </ConfirmDialog>
  );
}

const GRACES: [number, string][] = [
  [0, 'none: the present secret ends now'],
  [3600, 'an hour'],
  [86_400, 'a day'],
  [7 * 86_400, 'a week'],
  [30 * 86_400, '30 days'],
];

/** A new secret for a key. */
export function RotateDialog({
  of: key,
  onClose,
  onRotated,
}: {
  of: Key;
  onClose: () => void;
  onRotated: (key: NewKey) => void;
}) {
  const [grace, setGrace] = useState(86_400);
  const rotate = useChange(async (seconds: number) => {
    const params = { path: { key_id: key.id } };
    return body(
      await client.POST('/v1/keys/{key_id}/rotate', { params, body: { grace_seconds: seconds } }),
    );
  }, onRotated);
  return (
    <FormDialog
      title={`Rotate ${key.name}`}
      submit="Make the new secret"
      disabled={rotate.isPending}
      onSubmit={() => rotate.mutate(grace)}
      onClose={onClose}
    >
      <Field
        label="The present secret still serves for"
        hint="A secret from an earlier rotation ends at once."
      >
        <select
          className="select"
          value={grace}
          onChange={(event) => setGrace(Number(event.target.value))}
        >
          {GRACES.map(([seconds, label]) => (
            <option key={seconds} value={seconds}>
              {label}
            </option>
          ))}
        </select>
      </Field>
    </FormDialog>
  );
}

/** Until when a key serves. */
export function ExpiryDialog({ of: key, onClose }: { of: Key; onClose: () => void }) {
  const [text, setText] = useState('');
  const change = useChange(
    async (expires_at: string | null) =>
      body(
        await client.PATCH('/v1/keys/{key_id}', {
          params: { path: { key_id: key.id } },
          body: { expires_at },
        }),
      ),
    (changed) => {
      toast(
        changed.expires_at
          ? `${key.name} ends ${formatTime(changed.expires_at)}`
          : `${key.name} does not end by itself`,
      );
      onClose();
    },
  );
  return (
    <FormDialog
      title={`When ${key.name} ends`}
      submit="Set"
      disabled={change.isPending || text === ''}
      onSubmit={() => change.mutate(new Date(text).toISOString())}
      onClose={onClose}
      more={
        <button
          type="button"
          className="button"
          disabled={change.isPending}
          onClick={() => change.mutate(null)}
        >
          Never
        </button>
      }
    >
      <Field label="End, in your time zone">
        <input
          type="datetime-local"
          className="input"
          value={text}
          onChange={(event) => setText(event.target.value)}
        />
      </Field>
    </FormDialog>
  );
}
