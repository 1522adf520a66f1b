import { useMemo } from 'react';
import type { Schemas } from '~/api/client';
import { curveOf, median } from '~/charts/curves';
import { Name } from '~/components/Name';
import { Card, Wide } from '~/components/Page';
import { StatusBadge } from '~/components/StatusBadge';
import { formatBytes, formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration } from '~/format/times';
import type { Json } from '~/pages/job/specDefaults';
import { secondsAtWork } from '~/pages/job/trained';
import type { Job } from '~/pages/job/useJob';
import { differences } from './specDiff';

/** What the jobs came to. */
export function Figures({ jobs, series }: { jobs: Job[]; series: readonly Schemas['Series'][] }) {
  return (
    <Card title="Figures">
      <Wide label="Figures of the jobs">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Job</th>
              <th scope="col">Status</th>
              <th scope="col" className="number">
                Steps
              </th>
              <th scope="col" className="number">
                Loss
              </th>
              <th scope="col" className="number">
                Evaluation loss
              </th>
              <th scope="col" className="number">
                Tokens/s, median
              </th>
              <th scope="col" className="number">
                Peak memory
              </th>
              <th scope="col" className="number">
                Time at work
              </th>
            </tr>
          </thead>
          <tbody>
            {jobs.map((job) => {
              const memory = (curveOf(series, 'memory/peak_bytes', job.id)?.max ?? []).filter(
                (value) => value !== null,
              );
              return (
                <tr key={job.id}>
                  <td>
                    <Name>{job.name ?? job.id}</Name>
                  </td>
                  <td>
                    <StatusBadge status={job.status} reason={job.reason} detail={job.detail} />
                  </td>
                  <td className="number">{job.progress.step.toLocaleString('en-US')}</td>
                  <td className="number">{formatNumber(job.latest_metrics['train/loss'])}</td>
                  <td className="number">{formatNumber(job.latest_metrics['eval/loss'])}</td>
                  <td className="number">
                    {formatCompact(
                      median(curveOf(series, 'perf/tokens_per_second', job.id)?.mean ?? []),
                    )}
                  </td>
                  <td className="number">
                    {memory.length > 0 ? formatBytes(Math.max(...memory)) : '–'}
                  </td>
                  <td className="number">{formatDuration(secondsAtWork(job.attempts))}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Wide>
    </Card>
  );
}

/** The fields in which their specs differ. */
export function Differences({ jobs }: { jobs: Job[] }) {
  const rows = useMemo(
    () => differences(jobs.map((job) => job.spec as { [name: string]: Json })),
    [jobs],
  );
  if (jobs.length < 2) return null;
  return (
    <Card title="Differences of recipe and spec">
      {rows.length === 0 ? (
        <p className="muted">The specs of these jobs are the same, but for names and labels.</p>
      ) : (
        <Wide label="Differences of the specs">
          <table className="table">
            <thead>
              <tr>
                <th scope="col">Field</th>
                {jobs.map((job) => (
                  <th key={job.id} scope="col">
                    <Name>{job.name ?? job.id}</Name>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map(({ path, values }) => (
                <tr key={path}>
                  <td>
                    <code>{path}</code>
                  </td>
                  {values.map((value, index) => (
                    <td key={jobs[index]?.id ?? index}>
                      {value === undefined ? (
                        <span className="muted">–</span>
                      ) : (
                        <code>{JSON.stringify(value)}</code>
                      )}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </Wide>
      )}
    </Card>
  );
}
