import { useMutation, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useSession } from '~/app/session';
import { Dialog } from '~/components/Dialog';
import { Field } from '~/components/Page';
import { ErrorState } from '~/components/states';

type Scope = 'jobs:read' | 'jobs:write' | 'admin' | 'node';

const SCOPES: [Scope, string][] = [
  ['jobs:read', 'read the jobs, data sets, webhooks and use of its owner'],
  ['jobs:write', 'make and change them'],
  ['admin', 'both, for every owner; keys, nodes, quotas, the audit log'],
  ['node', 'speak for one node; stands alone'],
];

/** A new key: whose, what it may, and until when. */
export function CreateKeyDialog(props: {
  onClose: () => void;
  onCreated: (key: Schemas['NewKeyObject']) => void;
}) {
  const queries = useQueryClient();
  const { data: session } = useSession();
  const [name, setName] = useState('');
  const [owner, setOwner] = useState(session?.owner ?? '');
  const [scopes, setScopes] = useState<readonly Scope[]>(['jobs:read', 'jobs:write']);
  const [node, setNode] = useState('');
  const [end, setEnd] = useState('');
  const create = useMutation({
    mutationFn: async () => {
      const request: Schemas['KeyRequest'] = { name, owner, scopes: [...scopes] };
      if (end) request.expires_at = new Date(end).toISOString();
      if (node) request.node = node;
      return body(await client.POST('/v1/keys', { body: request }));
    },
    onSuccess: (key) => {
      void queries.invalidateQueries({ queryKey: ['keys'] });
      props.onCreated(key);
    },
  });
  function toggle(scope: Scope, on: boolean) {
    if (scope === 'node') setScopes(on ? ['node'] : []);
    else
      setScopes((before) => [
        ...before.filter((one) => one !== scope && one !== 'node'),
        ...(on ? [scope] : []),
      ]);
  }
  return (
    <Dialog
      title="New key"
      onClose={props.onClose}
      actions={
        <>
          <button type="button" className="button" onClick={props.onClose}>
            Back
          </button>
          <button
            type="button"
            className="button primary"
            disabled={create.isPending || name === '' || owner === '' || scopes.length === 0}
            onClick={() => create.mutate()}
          >
            Make the key
          </button>
        </>
      }
    >
      <Field label="Name" hint="For people: laptop, ci, gpu-1.">
        <input
          className="input"
          value={name}
          maxLength={128}
          onChange={(event) => setName(event.target.value)}
        />
      </Field>
      <Field label="Owner" hint="Jobs belong to owners; keys of one owner see the same jobs.">
        <input
          className="input"
          value={owner}
          maxLength={128}
          onChange={(event) => setOwner(event.target.value)}
        />
      </Field>
      <fieldset className="plain-fieldset">
        <legend className="field-label">It may</legend>
        {SCOPES.map(([scope, meaning]) => (
          <label key={scope} className="check wrap">
            <input
              type="checkbox"
              checked={scopes.includes(scope)}
              onChange={(event) => toggle(scope, event.target.checked)}
            />
            <span>
              <code>{scope}</code> <span className="hint">{meaning}</span>
            </span>
          </label>
        ))}
      </fieldset>
      {scopes.includes('node') && (
        <Field
          label="Node"
          hint="The one node that it speaks for; empty: the first that registers with it."
        >
          <input
            className="input"
            value={node}
            maxLength={128}
            onChange={(event) => setNode(event.target.value)}
          />
        </Field>
      )}
      <Field label="Ends" hint="In your time zone; empty: never.">
        <input
          type="datetime-local"
          className="input"
          value={end}
          onChange={(event) => setEnd(event.target.value)}
        />
      </Field>
      {create.isError && <ErrorState error={create.error} />}
    </Dialog>
  );
}
