import { useMemo } from 'react';
import { curveOf } from '~/charts/curves';
import type { Mark } from '~/charts/lines';
import { type Job, useCheckpoints, useEvents } from './useJob';

/** Attempts after the first, checkpoints and alarms, at their steps. */
export function useMarks(job: Job, series: Parameters<typeof curveOf>[0] | undefined): Mark[] {
  const checkpoints = useCheckpoints(job.id).data?.items;
  const alarms = useEvents(
    job.id,
    ['fp8_alarm', 'parity_beyond', 'step_skipped', 'fallback_bf16', 'diverged'],
    500,
  ).data?.items;
  return useMemo(() => {
    const marks: Mark[] = [];
    for (const { attempt, step } of curveOf(series ?? [], 'train/loss')?.attempts.slice(1) ?? []) {
      marks.push({ step, kind: 'attempt', label: `attempt ${attempt}` });
    }
    for (const { step } of checkpoints ?? []) {
      if (step !== null) marks.push({ step, kind: 'checkpoint', label: `checkpoint ${step}` });
    }
    for (const { data, message } of alarms ?? []) {
      const step = (data as { step?: unknown }).step;
      if (typeof step === 'number') marks.push({ step, kind: 'alarm', label: message });
    }
    return marks;
  }, [series, checkpoints, alarms]);
}
