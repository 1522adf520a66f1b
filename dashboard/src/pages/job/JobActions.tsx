import { useQueryClient } from '@tanstack/react-query';
import { Link, useNavigate } from '@tanstack/react-router';
import { useState } from 'react';
import { request } from '~/api/client';
import { useScope } from '~/app/session';
import { ConfirmDialog } from '~/components/Dialog';
import { toast, toastError } from '~/components/Toast';
import { CloneDialog } from './CloneDialog';
import { type Job, jobPath } from './useJob';

const VERBS = {
  cancel: 'is being cancelled',
  pause: 'is being paused',
  resume: 'is queued again',
  start: 'is queued',
};
type Verb = keyof typeof VERBS;

/** What can be done with the job as it is now. */
export function JobActions({ job }: { job: Job }) {
  const queries = useQueryClient();
  const navigate = useNavigate();
  const mayWrite = useScope('jobs:write');
  const [busy, setBusy] = useState(false);
  const [dialog, setDialog] = useState<'cancel' | 'clone' | 'delete' | null>(null);

  async function act(verb: Verb) {
    setBusy(true);
    try {
      const answer = await request(`${jobPath(job.id)}/${verb}`, { method: 'POST' });
      queries.setQueryData(['job', job.id, 'object'], await answer.json());
      toast(`The job ${VERBS[verb]}`);
    } catch (error) {
      toastError(error);
      // It is not as it is shown: it has changed, or is gone.
      void queries.invalidateQueries({ queryKey: ['job', job.id, 'object'] });
    } finally {
      setBusy(false);
      setDialog(null);
    }
  }

  async function remove() {
    setBusy(true);
    try {
      await request(jobPath(job.id), { method: 'DELETE' });
      toast('The job was deleted');
      void queries.invalidateQueries({ queryKey: ['jobs'] });
      await navigate({ to: '/jobs' });
    } catch (error) {
      toastError(error);
      void queries.invalidateQueries({ queryKey: ['job', job.id, 'object'] });
      setBusy(false);
      setDialog(null);
    }
  }

  const why = mayWrite ? undefined : 'This needs a key with the scope jobs:write';
  const common = { type: 'button', disabled: busy || !mayWrite, title: why } as const;
  const { status } = job;
  return (
    <>
      <Link to="/compare" search={{ jobs: job.id }} className="button">
        Compare
      </Link>
      {status === 'draft' && (
        <button {...common} className="button primary" onClick={() => void act('start')}>
          Start
        </button>
      )}
      {(status === 'queued' || status === 'starting' || status === 'running') && (
        <button {...common} className="button" onClick={() => void act('pause')}>
          Pause
        </button>
      )}
      {status === 'paused' && (
        <button {...common} className="button primary" onClick={() => void act('resume')}>
          Resume
        </button>
      )}
      <button {...common} className="button" onClick={() => setDialog('clone')}>
        Clone and edit
      </button>
      {!job.is_final && (
        <button
          {...common}
          disabled={common.disabled || status === 'cancelling'}
          className="button danger"
          onClick={() => setDialog('cancel')}
        >
          Cancel
        </button>
      )}
      {job.is_final && (
        <button {...common} className="button danger" onClick={() => setDialog('delete')}>
          Delete
        </button>
      )}
      {dialog === 'cancel' && (
        <ConfirmDialog
          title="Cancel this job?"
          confirm="Cancel the job"
          busy={busy}
          onConfirm={() => void act('cancel')}
          onClose={() => setDialog(null)}
        >
          A running job saves a checkpoint and frees its device. It does not run again, but can be
          cloned.
        </ConfirmDialog>
      )}
      {dialog === 'delete' && (
        <ConfirmDialog
          title="Delete this job?"
          confirm="Delete for good"
          busy={busy}
          onConfirm={() => void remove()}
          onClose={() => setDialog(null)}
        >
          Its metrics, logs, checkpoints and model are removed. Its events stay.
        </ConfirmDialog>
      )}
      {dialog === 'clone' && <CloneDialog job={job} onClose={() => setDialog(null)} />}
    </>
  );
}
