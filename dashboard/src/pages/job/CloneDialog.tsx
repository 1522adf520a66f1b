import { useQueryClient } from '@tanstack/react-query';
import { useNavigate } from '@tanstack/react-router';
import { useState } from 'react';
import { request } from '~/api/client';
import specSchema from '~/api/generated/spec-schema.json';
import { useIdempotencyKey } from '~/api/idempotency';
import { Dialog } from '~/components/Dialog';
import { ErrorState } from '~/components/states';
import { toast } from '~/components/Toast';
import { copyOf, fieldsOf, type Json, mergePatch } from './specDefaults';
import { type Job, jobPath } from './useJob';

type Spec = { [name: string]: Json };

/** A new job with the spec of this one, changed by hand. */
export function CloneDialog({ job, onClose }: { job: Job; onClose: () => void }) {
  const navigate = useNavigate();
  const queries = useQueryClient();
  const spec = job.spec as Spec;
  // The rest is at its defaults, and would only hide what makes this job.
  const [base] = useState(() =>
    copyOf(fieldsOf(spec, specSchema), (job.spec_given ?? null) as Spec | null),
  );
  const [text, setText] = useState(() => JSON.stringify(base, null, 2));
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const keyOf = useIdempotencyKey();

  async function submit(draft: boolean) {
    setError(null);
    let edited: Spec;
    try {
      edited = JSON.parse(text) as Spec;
    } catch (problem) {
      setError(new Error(`This is no JSON: ${problem instanceof Error ? problem.message : ''}`));
      return;
    }
    setBusy(true);
    try {
      const path = `${jobPath(job.id)}/clone${draft ? '?draft=true' : ''}`;
      const json = mergePatch(base, edited);
      const headers = { 'Idempotency-Key': keyOf(path + JSON.stringify(json)) };
      const answer = await request(path, { method: 'POST', json, headers });
      const made = (await answer.json()) as Job;
      toast(draft ? 'A draft was made' : 'The new job is queued');
      void queries.invalidateQueries({ queryKey: ['jobs'] });
      onClose();
      await navigate({
        to: '/jobs/$jobId',
        params: { jobId: made.id },
        search: {},
      });
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }

  return (
    <Dialog
      wide
      title={`Clone ${job.name ?? job.id}`}
      onClose={onClose}
      actions={
        <>
          <button type="button" className="button" onClick={onClose}>
            Back
          </button>
          <button
            type="button"
            className="button"
            disabled={busy}
            onClick={() => void submit(true)}
          >
            Save as a draft
          </button>
          <button
            type="button"
            className="button primary"
            disabled={busy}
            onClick={() => void submit(false)}
          >
            Submit
          </button>
        </>
      }
    >
      <label className="field">
        <span className="field-label">Spec of the new job</span>
        <textarea
          className="textarea code-edit"
          spellCheck={false}
          value={text}
          aria-invalid={error !== null}
          onChange={(event) => setText(event.target.value)}
        />
        <span className="hint">
          What is not here has its default. A field that is removed takes its default too.
        </span>
      </label>
      {error !== null && <ErrorState error={error} />}
    </Dialog>
  );
}
