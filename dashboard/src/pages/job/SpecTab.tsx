import { Fragment, useMemo, useState } from 'react';
import specSchema from '~/api/generated/spec-schema.json';
import { CopyButton } from '~/components/CopyButton';
import { Card } from '~/components/Page';
import { asCommand, asCurl, asPython } from './snippets';
import { copyOf, type Field, fieldsOf, type Json, type Origin, originOf } from './specDefaults';
import type { Job } from './useJob';

type Spec = { [name: string]: Json };
type Sourced = Field & { origin: Origin };

// What is asked for first; the rest follows as it is stored.
const ORDER = ['job', 'model', 'data', 'recipe', 'training', 'conversion'];
const FROM: Record<Origin, string> = {
  set: '',
  default: '',
  recipe: 'from the recipe',
  service: 'found by the service',
};

/** The spec as it was stored: what was set, and apart from it what the service filled in. */
export default function SpecTab({ job }: { job: Job }) {
  const [filledShown, setFilledShown] = useState(true);
  const spec = job.spec as Spec;
  const given = (job.spec_given ?? null) as Spec | null;
  const fields = useMemo(
    () =>
      fieldsOf(spec, specSchema).map((field): Sourced => {
        return { ...field, origin: originOf(field, given) };
      }),
    [spec, given],
  );
  const set = fields.filter(({ origin }) => origin === 'set');
  const filled = fields.filter(({ origin }) => origin !== 'set');
  // A named recipe may have another version by now, and an upload another content.
  const copied = useMemo(() => copyOf(fields, given), [fields, given]);
  const origin = window.location.origin;
  return (
    <>
      <div className="row">
        <span className="hint">Copies hold what makes this very spec; defaults are left out.</span>
        <span className="nav-space" />
        <span className="row">
          <CopyButton label="Copy JSON" text={() => JSON.stringify(spec, null, 2)} />
          <CopyButton label="Copy as curl" text={() => asCurl(copied, origin)} />
          <CopyButton label="Copy as command" text={() => asCommand(copied, origin)} />
          <CopyButton label="Copy as Python" text={() => asPython(copied, origin)} />
        </span>
      </div>
      {given === null && (
        <p className="note">
          This job is older than the record of what was written in a spec. What is shown as set is
          what differs from its default.
        </p>
      )}
      <section aria-label="Set" className="stack">
        <h2 className="spec-heading">
          Set <span className="hint">{set.length} fields</span>
        </h2>
        <Groups fields={[...namedRecipe(job, given), ...set]} />
      </section>
      <section aria-label="Filled in" className="stack">
        <h2 className="spec-heading">
          Filled in <span className="hint">{filled.length} fields that nobody wrote</span>
          <label className="check">
            <input
              type="checkbox"
              checked={filledShown}
              onChange={(event) => setFilledShown(event.target.checked)}
            />
            Show them
          </label>
        </h2>
        {filledShown && <Groups fields={filled} />}
      </section>
      {job.notes !== '' && (
        <Card title="Notes">
          <p className="notes">{job.notes}</p>
        </Card>
      )}
    </>
  );
}

/** The recipe that was written by its name: the spec itself holds what it stands for. */
function namedRecipe(job: Job, given: Spec | null): Sourced[] {
  const written = given?.recipe as { name?: Json } | undefined;
  const name = job.recipe_from?.name ?? written?.name;
  if (typeof name !== 'string') return [];
  const version = job.recipe_from?.version;
  return [
    {
      path: ['recipe', 'name'],
      value: version === undefined ? name : `${name}, version ${version}`,
      isDefault: false,
      isKind: false,
      description: 'A recipe of the service, by its name.',
      origin: 'set',
    },
  ];
}

function Groups({ fields }: { fields: readonly Sourced[] }) {
  const groups = new Map<string, Sourced[]>();
  for (const field of fields) {
    const group = field.path.length > 1 ? (field.path[0] ?? '') : 'job';
    groups.set(group, [...(groups.get(group) ?? []), field]);
  }
  const rank = (group: string) => (ORDER.includes(group) ? ORDER.indexOf(group) : ORDER.length);
  const sorted = [...groups].sort(([one], [other]) => rank(one) - rank(other));
  return (
    <div className="spec-groups">
      {sorted.map(([group, members]) => (
        <Card key={group} title={group} level={3}>
          <dl className="facts spec">
            {members.map((field) => (
              <SpecField key={field.path.join('/')} field={field} group={group} />
            ))}
          </dl>
        </Card>
      ))}
    </div>
  );
}

function SpecField({ field, group }: { field: Sourced; group: string }) {
  const path = field.path[0] === group ? field.path.slice(1) : field.path;
  const names = path.join('.').split(/(?<=[._])/);
  return (
    <div
      className={field.origin === 'set' ? 'spec-row' : 'spec-row filled'}
      title={field.description}
    >
      <dt>
        {names.map((part, index) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: the parts of a name stay where they are
          <Fragment key={index}>
            {part}
            <wbr />
          </Fragment>
        ))}
      </dt>
      <dd>
        <code>{textOf(field.value)}</code>
        {FROM[field.origin] !== '' && <span className="hint"> {FROM[field.origin]}</span>}
      </dd>
    </div>
  );
}

/** A value as it is written; pairs of texts, such as labels, a line each. */
function textOf(value: Json): string {
  if (typeof value === 'string') return value;
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    return JSON.stringify(value);
  }
  const members = Object.entries(value);
  return members.length > 0 && members.every(([, member]) => typeof member === 'string')
    ? members.map(([name, member]) => `${name}=${member}`).join('\n')
    : JSON.stringify(value, null, 1);
}
