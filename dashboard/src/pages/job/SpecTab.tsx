import { useMemo, useState } from 'react';
import specSchema from '~/api/generated/spec-schema.json';
import { CopyButton } from '~/components/CopyButton';
import { Card } from '~/components/Page';
import { asCommand, asCurl, asPython } from './snippets';
import { type Field, fieldsOf, type Json, setOnly } from './specDefaults';
import type { Job } from './useJob';

// What is asked for first; the rest follows as it is stored.
const ORDER = ['job', 'model', 'data', 'recipe', 'training', 'conversion'];

/** The spec as it was stored: what was set, and apart from it what stands at its default. */
export default function SpecTab({ job }: { job: Job }) {
  const [defaults, setDefaults] = useState(true);
  const spec = job.spec as { [name: string]: Json };
  const fields = useMemo(() => fieldsOf(spec, specSchema), [spec]);
  const minimal = useMemo(() => setOnly(fields), [fields]);
  const groups = useMemo(() => {
    const found = new Map<string, Field[]>();
    for (const field of fields) {
      if (field.isDefault && !defaults) continue;
      const group = field.path.length > 1 ? (field.path[0] ?? '') : 'job';
      found.set(group, [...(found.get(group) ?? []), field]);
    }
    const rank = (group: string) => (ORDER.includes(group) ? ORDER.indexOf(group) : ORDER.length);
    return [...found].sort(([one], [other]) => rank(one) - rank(other));
  }, [fields, defaults]);
  const origin = window.location.origin;
  return (
    <>
      <div className="row">
        <label className="check">
          <input
            type="checkbox"
            checked={defaults}
            onChange={(event) => setDefaults(event.target.checked)}
          />
          Show defaults ({fields.filter((field) => field.isDefault).length})
        </label>
        <span className="hint">
          Bold: other than the default. Copies hold those alone; the service fills in the rest.
        </span>
        <span className="nav-space" />
        <CopyButton label="Copy JSON" text={() => JSON.stringify(spec, null, 2)} />
        <CopyButton label="Copy as curl" text={() => asCurl(minimal, origin)} />
        <CopyButton label="Copy as command" text={() => asCommand(minimal, origin)} />
        <CopyButton label="Copy as Python" text={() => asPython(minimal, origin)} />
      </div>
      <div className="spec-groups">
        {groups.map(([group, members]) => (
          <Card key={group} title={group}>
            <dl className="facts spec">
              {members.map((field) => (
                <SpecField key={field.path.join('/')} field={field} group={group} />
              ))}
            </dl>
          </Card>
        ))}
      </div>
      {job.notes !== '' && (
        <Card title="Notes">
          <p className="notes">{job.notes}</p>
        </Card>
      )}
    </>
  );
}

function SpecField({ field, group }: { field: Field; group: string }) {
  const path = field.path[0] === group ? field.path.slice(1) : field.path;
  const text =
    typeof field.value === 'string'
      ? field.value
      : JSON.stringify(field.value, null, Array.isArray(field.value) ? 0 : 1);
  return (
    <div className={field.isDefault ? 'spec-row default' : 'spec-row'} title={field.description}>
      <dt>{path.join('.')}</dt>
      <dd>
        <code>{text}</code>
        {field.isDefault && <span className="hint"> default</span>}
      </dd>
    </div>
  );
}
