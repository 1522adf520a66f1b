/** Where the specs of several jobs differ: one row a field, one value a job. */

import { type Json, same } from '~/pages/job/specDefaults';

export interface Difference {
  path: string;
  /** The value of each job; undefined where its spec has no such field. */
  values: (Json | undefined)[];
}

const isObject = (value: unknown): value is { [name: string]: Json } =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** Names and labels tell jobs apart anyway; they are no difference of what was trained. */
const PASSED_OVER = new Set(['name', 'labels', 'notes']);

export function differences(specs: readonly { [name: string]: Json }[]): Difference[] {
  const found: Difference[] = [];
  compare(specs, [], found);
  // What FP8 is about comes first.
  const rank = ({ path }: Difference) =>
    path.startsWith('recipe') ? 0 : path.startsWith('conversion') ? 1 : 2;
  return found.sort((one, other) => rank(one) - rank(other) || one.path.localeCompare(other.path));
}

function compare(values: readonly (Json | undefined)[], path: string[], found: Difference[]): void {
  if (values.every((value) => same(value, values[0]))) return;
  const objects = values.filter((value) => value !== undefined && value !== null);
  // Into objects of the same shape; where a job has none at all, the whole is told.
  if (objects.length === values.length && objects.every(isObject)) {
    const names = new Set(values.flatMap((value) => (isObject(value) ? Object.keys(value) : [])));
    for (const name of names) {
      if (path.length === 0 && PASSED_OVER.has(name)) continue;
      compare(
        values.map((value) => (isObject(value) ? value[name] : undefined)),
        [...path, name],
        found,
      );
    }
    return;
  }
  found.push({ path: path.join('.'), values: [...values] });
}
