import { useMutation, useQueryClient } from '@tanstack/react-query';
import { useState } from 'react';
import { body, client, type Schemas } from '~/api/client';
import { Choices } from '~/components/Choices';
import { FormDialog } from '~/components/Dialog';
import { Field } from '~/components/Page';

const CHOICES: [string, string][] = [
  ['job.*', 'everything that happens to a job'],
  ['job.running', 'training has begun'],
  ['job.succeeded', 'a job has succeeded'],
  ['job.failed', 'a job has failed'],
  ['job.cancelled', 'a job was cancelled'],
  ['job.paused', 'a job is paused'],
  ['job.event.*', 'alarms, checkpoints and other events'],
];

/** A new endpoint: where to, and of what. */
export function CreateWebhookDialog(props: {
  onClose: () => void;
  onCreated: (webhook: Schemas['NewWebhookObject']) => void;
}) {
  const queries = useQueryClient();
  const [url, setUrl] = useState('');
  const [description, setDescription] = useState('');
  const [events, setEvents] = useState<readonly string[]>(['job.succeeded', 'job.failed']);
  const create = useMutation({
    mutationFn: async () => {
      const request: Schemas['WebhookRequest'] = { url, description, events: [...events] };
      return body(await client.POST('/v1/webhooks', { body: request }));
    },
    onSuccess: (webhook) => {
      void queries.invalidateQueries({ queryKey: ['webhooks'] });
      props.onCreated(webhook);
    },
  });
  return (
    <FormDialog
      title="New webhook"
      submit="Make it"
      disabled={create.isPending || url === '' || events.length === 0}
      onSubmit={() => create.mutate()}
      onClose={props.onClose}
      error={create.error}
    >
      <Field label="URL" hint="https, and an address that the operator allows.">
        <input
          className="input"
          type="url"
          value={url}
          placeholder="https://hooks.example.com/octrain"
          onChange={(event) => setUrl(event.target.value)}
        />
      </Field>
      <Field label="Description">
        <input
          className="input"
          value={description}
          maxLength={200}
          onChange={(event) => setDescription(event.target.value)}
        />
      </Field>
      <Choices
        label="When"
        choices={CHOICES}
        chosen={events}
        onToggle={(name, on) =>
          setEvents((before) => [...before.filter((one) => one !== name), ...(on ? [name] : [])])
        }
      />
    </FormDialog>
  );
}
