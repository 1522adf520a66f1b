// Writes what the sources take from the committed OpenAPI document: the types of every request and
// answer, and the JSON schema of a job's spec with its defaults.
import { mkdir, readFile, writeFile } from 'node:fs/promises';
import openapiTS, { astToString } from 'openapi-typescript';

const document = new URL('../../tests/api/openapi.json', import.meta.url);
const folder = new URL('../src/api/generated/', import.meta.url);

const api = JSON.parse(await readFile(document, 'utf8'));
await mkdir(folder, { recursive: true });

// It changes what it is given: words of its own come into descriptions.
const types = astToString(
  await openapiTS(structuredClone(api), { defaultNonNullable: false, silent: true }),
);
await writeFile(new URL('schema.d.ts', folder), types);

const schemas = api.components.schemas;
const parts = Object.fromEntries(
  Object.entries(schemas).filter(([name]) => name === 'JobSpec' || name.startsWith('Spec')),
);
const text = JSON.stringify({ $ref: '#/$defs/JobSpec', $defs: parts });
await writeFile(
  new URL('spec-schema.json', folder),
  text.replaceAll('#/components/schemas/', '#/$defs/'),
);
