import { useMutation, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { useSession } from '~/app/session';
import { Choices } from '~/components/Choices';
import { FormDialog } from '~/components/Dialog';
import { Field } from '~/components/Page';

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
    <FormDialog
      title="New key"
      submit="Make the key"
      disabled={create.isPending || name === '' || owner === '' || scopes.length === 0}
      onSubmit={() => create.mutate()}
      onClose={props.onClose}
      error={create.error}
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
      <Choices label="It may" choices={SCOPES} chosen={scopes} onToggle={toggle} />
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
    </FormDialog>
  );
}
