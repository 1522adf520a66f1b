/** The charts of a job: which metrics they show, and how. */

import type { Schemas } from '~/api/client';
import { type Curve, curveOf } from '~/charts/curves';
import type { Line } from '~/charts/lines';
import { type Format, formatBytes, formatCompact, formatPercent } from '~/format/numbers';

interface Known {
  title: string;
  names: readonly [name: string, label: string][];
  format?: Format;
  log?: boolean;
  zero?: boolean;
  steady?: boolean;
}

// biome-ignore format: a table
const PANELS: Known[] = [
  { title: 'Loss', names: [['train/loss', 'training'], ['eval/loss', 'evaluation'], ['parity/reference_loss', 'reference']], log: true },
  { title: 'Gap to the reference', names: [['parity/gap', 'gap']], format: formatPercent },
  { title: 'Gradient norm', names: [['train/grad_norm', 'norm']], log: true },
  { title: 'Learning rate', names: [['train/lr', 'rate']], steady: true },
  { title: 'Throughput, tokens/s', names: [['perf/tokens_per_second', 'tokens/s']], format: formatCompact, zero: true },
  { title: 'Peak memory', names: [['memory/peak_bytes', 'peak']], format: formatBytes, steady: true, zero: true },
  { title: 'GPU utilization', names: [['gpu/utilization', 'GPU']], format: formatPercent, zero: true },
  { title: 'GPU memory', names: [['gpu/memory_bytes', 'memory']], format: formatBytes, steady: true, zero: true },
  { title: 'GPU power, W', names: [['gpu/power_watts', 'power']], zero: true },
];
/** The metrics that have a chart without asking. */
export const NAMES: readonly string[] = PANELS.flatMap(({ names }) => names.map(([name]) => name));
const COLOURS = ['--series-1', '--series-2', '--series-3', '--series-4'];

/** The panels that these series fill: the known ones, then one for each other name. */
export function panelsOf(series: readonly Schemas['Series'][], others: readonly string[]) {
  const byName = new Map<string, Schemas['Series'][]>();
  for (const one of series) {
    const known = byName.get(one.name);
    if (known) known.push(one);
    else byName.set(one.name, [one]);
  }
  const alone = others.map((name): Known => ({ title: name, names: [[name, name]] }));
  return [...PANELS, ...alone].flatMap((panel) => {
    const lines = panel.names.flatMap(([name, label], index): Line[] => {
      const curve = curveOf(byName.get(name) ?? [], name);
      return curve === null ? [] : [lineOf(panel, name, label, index, curve)];
    });
    return lines.length > 0 ? [{ ...panel, lines }] : [];
  });
}

function lineOf(panel: Known, name: string, label: string, index: number, curve: Curve): Line {
  return {
    label,
    curve,
    colour: COLOURS[index] ?? '--series-1',
    dashed: name === 'parity/reference_loss',
    steady: panel.steady || name.startsWith('eval/'),
    band: index === 0 && curve.width > 1,
  };
}
