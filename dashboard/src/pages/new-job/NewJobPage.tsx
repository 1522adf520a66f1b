import { useQuery, useQueryClient } from '@tanstack/react-query';
import { useNavigate, useSearch } from '@tanstack/react-router';
import { useMemo, useState } from 'react';
import { request, type Schemas } from '~/api/client';
import specSchema from '~/api/generated/spec-schema.json';
import { useIdempotencyKey } from '~/api/idempotency';
import { useScope } from '~/app/session';
import { CopyButton } from '~/components/CopyButton';
import { Card, Page } from '~/components/Page';
import { EmptyState, ErrorState, Loading } from '~/components/states';
import { toastError } from '~/components/Toast';
import { EXAMPLE } from './example';
import { JsonEditor } from './JsonEditor';
import './new-job.css';
import { Presets } from './Presets';
import { ReportPanel } from './ReportPanel';
import { Parts, SchemaField, SchemaForm } from './SchemaForm';
import {
  controlOf,
  isObject,
  type Json,
  type JsonObject,
  labelOf,
  type Path,
  resolve,
  type Schema,
  withFragment,
  withoutDefaults,
  withValue,
} from './schema';
import { useValidation } from './useValidation';

const root = specSchema as unknown as Schema;
const properties = resolve(root, root).properties ?? {};

/** The parts that every job has to decide on; what the others hold has good defaults. */
const SECTIONS: { title: string; names: string[] }[] = [
  { title: 'Name', names: ['name', 'labels', 'notes', 'priority'] },
  { title: 'Model', names: ['model'] },
  { title: 'Data', names: ['data'] },
  { title: 'Precision recipe', names: ['recipe'] },
  { title: 'Training', names: ['training'] },
];
const MAIN = new Set(SECTIONS.flatMap((section) => section.names));
const HIDDEN = new Set(['spec_version']);

/** A new job: from nothing, from the example, or from another job (`?from=job_...`). */
export default function NewJobPage() {
  const search = useSearch({ strict: false }) as { from?: string };
  const from = search.from;
  const job = useQuery({
    queryKey: ['job-spec', from],
    enabled: from !== undefined,
    staleTime: Number.POSITIVE_INFINITY,
    queryFn: async ({ signal }) => {
      const answer = await request(`/v1/jobs/${encodeURIComponent(from ?? '')}`, { signal });
      return (await answer.json()) as Schemas['JobDetail'];
    },
  });
  if (from !== undefined && job.isPending) return <Loading label="Reading the job" />;
  if (from !== undefined && job.isError) {
    return <ErrorState error={job.error} onRetry={() => void job.refetch()} />;
  }
  const spec = isObject(job.data?.spec)
    ? withoutDefaults(job.data.spec as JsonObject, root, root)
    : EXAMPLE;
  return <Editor key={from ?? ''} initial={spec} from={from} />;
}

function Editor({ initial, from }: { initial: JsonObject; from: string | undefined }) {
  const [spec, setSpec] = useState<JsonObject>(initial);
  const [view, setView] = useState<'form' | 'json'>('form');
  const mayWrite = useScope('jobs:write');
  const { report, error, refetch, isCurrent } = useValidation(spec);
  const problems = useMemo(
    () => new Map((report?.errors ?? []).map((problem) => [problem.pointer, problem.message])),
    [report],
  );
  const change = (path: Path, value: Json | undefined) =>
    setSpec((before) => withValue(before, path, value));
  if (!mayWrite) {
    return (
      <Page title="New job">
        <EmptyState title="This key may not submit jobs">
          Sign in with a key that has the scope jobs:write.
        </EmptyState>
      </Page>
    );
  }
  return (
    <Page
      title={from ? 'New job from another' : 'New job'}
      actions={
        <>
          <fieldset className="segmented" aria-label="How the spec is edited">
            <button type="button" aria-pressed={view === 'form'} onClick={() => setView('form')}>
              Form
            </button>
            <button type="button" aria-pressed={view === 'json'} onClick={() => setView('json')}>
              JSON
            </button>
          </fieldset>
          <button type="button" className="button" onClick={() => setSpec({})}>
            Empty it
          </button>
          <button type="button" className="button" onClick={() => setSpec(EXAMPLE)}>
            Example
          </button>
        </>
      }
    >
      <div className="new-job">
        <div className="new-job-main">
          {view === 'json' ? (
            <Card
              title="The spec"
              actions={<CopyButton text={() => JSON.stringify(spec, null, 2)} label="Copy" />}
            >
              <JsonEditor spec={spec} onChange={setSpec} />
            </Card>
          ) : (
            <SchemaForm root={root} spec={spec} change={change} problems={problems}>
              <Form
                spec={spec}
                onPreset={(fragment) => setSpec((before) => withFragment(before, fragment))}
              />
            </SchemaForm>
          )}
        </div>
        <aside className="new-job-side" aria-label="What the service says of it">
          <ReportPanel
            report={report}
            error={error}
            isCurrent={isCurrent}
            onRetry={() => void refetch()}
          />
          <Submission
            spec={spec}
            valid={report?.valid === true}
            fits={onlyLacksNode(report)}
            isCurrent={isCurrent}
          />
        </aside>
      </div>
    </Page>
  );
}

/** Whether the job could be queued all the same: nothing but a capable node is missing. */
function onlyLacksNode(report: Schemas['ValidationReport'] | undefined): boolean {
  return (
    (report?.errors.length ?? 0) > 0 &&
    (report?.errors.every((error) => error.code === 'no_capable_node') ?? false)
  );
}

function Form({ spec, onPreset }: { spec: JsonObject; onPreset: (fragment: JsonObject) => void }) {
  const others = Object.keys(properties).filter((name) => !MAIN.has(name) && !HIDDEN.has(name));
  return (
    <>
      {SECTIONS.map((section) => (
        <Card key={section.title} title={section.title}>
          {section.title === 'Precision recipe' && (
            <details className="spec-group" open>
              <summary>
                <span className="field-label">Presets</span>
                <span className="hint">what each is for</span>
              </summary>
              <Presets spec={spec} onChoose={onPreset} />
            </details>
          )}
          <Section names={section.names} />
        </Card>
      ))}
      <Card title="More">
        <div className="parts">
          {others.map((name) => (
            <SchemaField key={name} name={name} path={[name]} schema={properties[name] ?? {}} />
          ))}
        </div>
      </Card>
    </>
  );
}

/** One part alone fills its card without a heading of its own; several stand side by side. */
function Section({ names }: { names: string[] }) {
  const only = names.length === 1 ? names[0] : undefined;
  const schema = only !== undefined ? properties[only] : undefined;
  if (only !== undefined && schema !== undefined) {
    const control = controlOf(only, schema, root);
    const required = resolve(root, root).required?.includes(only) ?? false;
    return (
      <Parts name={labelOf(only, schema)} path={[only]} control={control} required={required} />
    );
  }
  return (
    <div className="parts">
      {names.map((name) => (
        <SchemaField key={name} name={name} path={[name]} schema={properties[name] ?? {}} />
      ))}
    </div>
  );
}

function Submission(props: {
  spec: JsonObject;
  valid: boolean;
  fits: boolean;
  isCurrent: boolean;
}) {
  const queries = useQueryClient();
  const navigate = useNavigate();
  const [busy, setBusy] = useState(false);
  const [wait, setWait] = useState(false);
  const keyOf = useIdempotencyKey();
  async function submit(draft: boolean) {
    setBusy(true);
    try {
      const query = new URLSearchParams();
      if (draft) query.set('draft', 'true');
      if (wait) query.set('allow_waiting', 'true');
      const path = `/v1/jobs?${query}`;
      const answer = await request(path, {
        method: 'POST',
        json: props.spec,
        headers: { 'Idempotency-Key': keyOf(path + JSON.stringify(props.spec)) },
      });
      const job = (await answer.json()) as Schemas['JobDetail'];
      void queries.invalidateQueries({ queryKey: ['jobs'] });
      await navigate({ to: '/jobs/$jobId', params: { jobId: job.id } });
    } catch (error) {
      toastError(error);
      setBusy(false);
    }
  }
  const ready = props.isCurrent && (props.valid || (wait && props.fits));
  return (
    <div className="submission">
      <label className="check">
        <input type="checkbox" checked={wait} onChange={(event) => setWait(event.target.checked)} />
        Wait for a node where none can run it yet
      </label>
      <div className="submission-buttons">
        <button
          type="button"
          className="button primary"
          disabled={busy || !ready}
          onClick={() => void submit(false)}
        >
          Submit
        </button>
        <button
          type="button"
          className="button"
          disabled={busy || !ready}
          onClick={() => void submit(true)}
        >
          Keep as a draft
        </button>
      </div>
    </div>
  );
}
