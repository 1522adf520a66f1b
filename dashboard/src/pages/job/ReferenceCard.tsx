import { useQuery } from '@tanstack/react-query';
import { Link } from '@tanstack/react-router';
import { useMemo } from 'react';
import type { Schemas } from '~/api/client';
import { curveOf, median } from '~/charts/curves';
import { Name } from '~/components/Name';
import { Card, Tile } from '~/components/Page';
import { formatBytes, formatCompact, formatPercent, formatRatio, numberOf } from '~/format/numbers';
import { isReference } from './reference';
import type { Json } from './specDefaults';
import { type Job, readJson } from './useJob';

type Candidate = Pick<Job, 'id' | 'name' | 'spec' | 'device' | 'status'>;
const SPEED = 'perf/tokens_per_second';
const MEMORY = 'memory/peak_bytes';

/** Speed and memory against a like job in BF16, where there is one; and the gap of losses. */
export function ReferenceCard({ job }: { job: Job }) {
  const spec = job.spec as { [name: string]: Json };
  const candidates = useQuery({
    queryKey: ['jobs', 'references', job.owner],
    queryFn: ({ signal }) =>
      readJson<{ items: Candidate[] }>(
        '/v1/jobs?limit=200&status=succeeded,running,paused&fields=name,spec,device,status',
        signal,
      ),
    staleTime: 60_000,
  });
  const reference = useMemo(
    () =>
      candidates.data?.items.find(
        (other) =>
          other.id !== job.id &&
          isReference(spec, other.spec as { [name: string]: Json }, job.device, other.device),
      ) ?? null,
    [candidates.data, job.id, job.device, spec],
  );
  const figures = useQuery({
    queryKey: ['job', job.id, 'against', reference?.id],
    queryFn: ({ signal }) => {
      const query = new URLSearchParams([
        ['job', job.id],
        ['job', reference?.id ?? ''],
        ['name', SPEED],
        ['name', MEMORY],
        ['form', 'buckets'],
        ['max_points', '300'],
      ]);
      return readJson<Schemas['JobsSeries']>(`/v1/metrics/query?${query}`, signal);
    },
    enabled: reference !== null,
  });
  const latest = job.latest_metrics;
  const gap = latest['parity/gap'];
  const parity = (
    spec.training as { parity?: { bound: number; dtype: string; steps: number } | null }
  )?.parity;
  const engine = (spec.recipe as { engine?: string })?.engine;
  const speeds =
    figures.data && reference ? medians(figures.data, SPEED, job.id, reference.id) : null;
  const memory = figures.data && reference ? peaks(figures.data, job.id, reference.id) : null;
  return (
    <Card title="Against high precision">
      <div className="tiles">
        {speeds ? (
          <Tile
            label="Speed against BF16"
            value={formatRatio(speeds[0] / speeds[1])}
            tone={engine === 'emulated' ? undefined : speeds[0] >= speeds[1] ? 'good' : 'bad'}
            note={`${formatCompact(speeds[0])} against ${formatCompact(speeds[1])} tokens/s, medians`}
          />
        ) : null}
        {memory ? (
          <Tile
            label="Peak memory against BF16"
            value={formatRatio(memory[0] / memory[1])}
            note={`${formatBytes(memory[0])} against ${formatBytes(memory[1])}`}
          />
        ) : null}
        {parity && gap !== undefined ? (
          <Tile
            label={`Loss against ${parity.dtype}`}
            value={formatPercent(gap)}
            note={`at the newest of ${parity.steps} compared steps; bound ${formatPercent(parity.bound)} (smoothed)`}
          />
        ) : null}
      </div>
      <p className="hint">
        {reference ? (
          <>
            The BF16 job is{' '}
            <Link to="/jobs/$jobId" params={{ jobId: reference.id }}>
              <Name>{reference.name ?? reference.id}</Name>
            </Link>
            : same model, device and sizes.{' '}
            <Link to="/compare" search={{ jobs: `${job.id},${reference.id}` }}>
              Compare the two
            </Link>
            .
            {engine === 'emulated'
              ? ' The engine emulated computes FP8 by other means: it shows numerics, not speed.'
              : ''}
          </>
        ) : engine === 'amp' ? (
          'This job trains in high precision itself.'
        ) : (
          <>
            No BF16 job to measure speed and memory against: clone this one with{' '}
            <code>{'"recipe": {"engine": "amp", "dtype": "bf16"}'}</code>.
          </>
        )}{' '}
        {parity || engine === 'amp'
          ? ''
          : 'For a curve of losses beside this one, set training.parity in the spec.'}
      </p>
    </Card>
  );
}

function medians(
  answer: Schemas['JobsSeries'],
  name: string,
  own: string,
  other: string,
): [number, number] | null {
  const [one, two] = [own, other].map((id) => median(curveOf(answer.series, name, id)?.mean ?? []));
  return one && two ? [one, two] : null;
}

function peaks(answer: Schemas['JobsSeries'], own: string, other: string): [number, number] | null {
  const [one, two] = [own, other].map((id) =>
    Math.max(
      0,
      ...(curveOf(answer.series, MEMORY, id)?.max ?? [])
        .map((value) => numberOf(value))
        .filter(Number.isFinite),
    ),
  );
  return one && two ? [one, two] : null;
}
