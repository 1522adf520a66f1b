/**
 * The first of these jobs, and those whose number of steps is of the same size, within a factor of four.
 *
 * Buckets of one answer have one width, which fits the longest job: beside it a short job would be
 * two points.
 */
export function ofOneLength<Job extends { progress: { step: number } }>(
  jobs: readonly Job[],
): Job[] {
  const span = ({ progress }: Job) => Math.floor(Math.log2(progress.step + 1) / 2);
  const [first] = jobs;
  return first === undefined ? [] : jobs.filter((job) => span(job) === span(first));
}
