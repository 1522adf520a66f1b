// Fails where the first load (the entry, all that it imports at once, its styles and the page) is
// larger than the limit, compressed with gzip.
import { readFile } from 'node:fs/promises';
import { gzipSync } from 'node:zlib';

const LIMIT = 250_000;
const dist = new URL('../dist/', import.meta.url);
const manifest = JSON.parse(await readFile(new URL('.vite/manifest.json', dist), 'utf8'));

const files = new Set(['index.html']);
function take(key) {
  const chunk = manifest[key];
  if (files.has(chunk.file)) return;
  files.add(chunk.file);
  for (const style of chunk.css ?? []) files.add(style);
  for (const imported of chunk.imports ?? []) take(imported);
}
for (const [key, chunk] of Object.entries(manifest)) if (chunk.isEntry) take(key);

let total = 0;
for (const file of files) {
  const size = gzipSync(await readFile(new URL(file, dist)), { level: 9 }).length;
  total += size;
  console.log(`${String(size).padStart(8)}  ${file}`);
}
console.log(`${String(total).padStart(8)}  first load, gzip; at most ${LIMIT}`);
if (total > LIMIT) {
  console.error('The first load is too large: load what a page alone needs with that page.');
  process.exit(1);
}
