/** The same job as a call of curl, of the command and of the Python client. */

import type { Json } from './specDefaults';

type Spec = { [name: string]: Json };

const END = 'END_OF_SPEC';

export function asCurl(spec: Spec, origin: string): string {
  return [
    `curl -sS --fail-with-body ${origin}/v1/jobs \\`,
    '  -H "Authorization: Bearer $OCTRAIN_API_KEY" -H "Content-Type: application/json" \\',
    `  --data-binary @- <<'${END}'`,
    JSON.stringify(spec, null, 2),
    END,
  ].join('\n');
}

export function asCommand(spec: Spec, origin: string): string {
  return [
    `octrain --url ${origin} submit -f - <<'${END}'`,
    JSON.stringify(spec, null, 2),
    END,
  ].join('\n');
}

export function asPython(spec: Spec, origin: string): string {
  return [
    'import octrain',
    '',
    `client = octrain.Client(${literal(origin, 0)})`,
    `job = client.jobs.create(${literal(spec, 0)})`,
    'job.wait(check=True)',
  ].join('\n');
}

/** A JSON value as Python writes it. */
export function literal(value: Json, depth: number): string {
  if (value === null) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  // What JSON escapes in a string, Python reads the same way.
  if (typeof value !== 'object') return JSON.stringify(value);
  const pad = '    '.repeat(depth + 1);
  const end = '    '.repeat(depth);
  if (Array.isArray(value)) {
    if (value.length === 0) return '[]';
    if (value.every((item) => item === null || typeof item !== 'object')) {
      return `[${value.map((item) => literal(item, 0)).join(', ')}]`;
    }
    return `[\n${value.map((item) => `${pad}${literal(item, depth + 1)},\n`).join('')}${end}]`;
  }
  const members = Object.entries(value);
  if (members.length === 0) return '{}';
  const lines = members.map(
    ([name, item]) => `${pad}${JSON.stringify(name)}: ${literal(item, depth + 1)},\n`,
  );
  return `{\n${lines.join('')}${end}}`;
}
