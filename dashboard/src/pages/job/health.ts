/** FP8 health as it is drawn: layers down, steps across. */

import type { Schemas } from '~/api/client';
import { numberOf } from '~/format/numbers';

export const FIGURES = {
  amax: { label: 'amax', help: 'Largest absolute value of the tensor', log: true, take: 'max' },
  scale: {
    label: 'Scale',
    help: 'What the tensor is multiplied by before the cast',
    log: true,
    take: 'last',
  },
  saturated: {
    label: 'Saturated',
    help: 'Share of the elements beyond the largest FP8 number, cut off',
    log: false,
    take: 'max',
  },
  underflow: {
    label: 'Underflow',
    help: 'Share of the elements that became zero in the cast',
    log: false,
    take: 'max',
  },
} as const;
export type Figure = keyof typeof FIGURES;

export const TENSORS = { input: 'Inputs', weight: 'Weights', grad_output: 'Gradients' } as const;
export type Tensor = keyof typeof TENSORS;

export interface HealthName {
  layer: string;
  tensor: string;
  figure: string;
}

/** `fp8/<layer>/<tensor>/<figure>`, where a layer's name may hold any character. */
export function parseName(name: string): HealthName | null {
  const parts = name.split('/');
  if (parts[0] !== 'fp8' || parts.length < 4) return null;
  return {
    layer: parts.slice(1, -2).join('/'),
    tensor: parts.at(-2) ?? '',
    figure: parts.at(-1) ?? '',
  };
}

export interface Heat {
  layers: string[];
  /** First steps of the columns, and how many steps each spans. */
  steps: number[];
  width: number;
  /** Column, row, what is drawn (a logarithm to base 2 where the figure has one) and the value. */
  cells: [number, number, number, number][];
  /** Cells whose figure was NaN or infinite. */
  notFinite: [number, number][];
  /** What the ends of the ramp of colours stand for, and whether there are cells beyond them. */
  low: number;
  high: number;
  beyond: { low: boolean; high: boolean };
}

/** A place in the training: a layer, and a step of it or (null) all of them. */
export interface Spot {
  layer: string;
  step: number | null;
}

const byParts = new Intl.Collator('en', { numeric: true });

function parentOf(layer: string): string {
  return layer.slice(0, Math.max(0, layer.lastIndexOf('.')));
}

/** The cells of one figure of one tensor of all layers. `order`: the layers as the model has them. */
export function heatOf(
  series: readonly Schemas['Series'][],
  tensor: string,
  figure: Figure,
  order: readonly string[] = [],
): Heat {
  const { log, take } = FIGURES[figure];
  const found = new Map<string, Schemas['Series'][]>();
  let width = 1;
  const steps = new Set<number>();
  for (const each of series) {
    const name = parseName(each.name);
    if (!name || name.tensor !== tensor || name.figure !== figure || !each.buckets) continue;
    found.set(name.layer, [...(found.get(name.layer) ?? []), each]);
    width = Math.max(width, each.width ?? 1);
    for (const step of each.buckets.first_step) steps.add(step);
  }
  const place = new Map(order.map((layer, index) => [layer, index]));
  // A GEMM of several layers (`watchedNames`) is before the first layer that it stands beside.
  const beside = new Map<string, number>();
  order.forEach((layer, index) => {
    if (!beside.has(parentOf(layer))) beside.set(parentOf(layer), index - 0.5);
  });
  const placeOf = (layer: string) =>
    place.get(layer) ?? beside.get(parentOf(layer)) ?? order.length;
  const layers = [...found.keys()].sort(
    (one, other) => placeOf(one) - placeOf(other) || byParts.compare(one, other),
  );
  const columns = [...steps].sort((one, other) => one - other);
  const column = new Map(columns.map((step, index) => [step, index]));
  const heat: Heat = {
    layers,
    steps: columns,
    width,
    cells: [],
    notFinite: [],
    low: Number.POSITIVE_INFINITY,
    high: Number.NEGATIVE_INFINITY,
    beyond: { low: false, high: false },
  };
  layers.forEach((layer, row) => {
    for (const { buckets } of found.get(layer) ?? []) {
      buckets?.first_step.forEach((step, index) => {
        const x = column.get(step) ?? 0;
        if ((buckets.non_finite[index] ?? 0) > 0) heat.notFinite.push([x, row]);
        const value = numberOf(buckets[take][index]);
        const drawn = log ? Math.log2(value) : value;
        if (!Number.isFinite(value) || (!Number.isFinite(drawn) && value !== 0)) return;
        // An amax of zero has no logarithm; it is left blank.
        if (!Number.isFinite(drawn)) return;
        heat.cells.push([x, row, drawn, value]);
        heat.low = Math.min(heat.low, drawn);
        heat.high = Math.max(heat.high, drawn);
      });
    }
  });
  if (heat.cells.length === 0) {
    heat.low = 0;
    heat.high = 1;
  }
  // Shares are shown from zero on: a heatmap of 0.01 % must not look like one of half.
  if (!log) {
    heat.low = 0;
    heat.high = Math.max(heat.high, 0.001);
    return heat;
  }
  const [low, high] = fences(heat.cells.map(([, , drawn]) => drawn));
  heat.beyond = { low: heat.low < low, high: heat.high > high };
  heat.low = Math.max(heat.low, low);
  heat.high = Math.min(heat.high, high);
  if (heat.low === heat.high) {
    heat.low -= 1;
    heat.high += 1;
  }
  return heat;
}

/**
 * Bounds beyond which values are outside: one and a half times the distance of the quartiles from
 * them (Tukey 1977, section 2D). The first step of delayed scaling, whose scales are all 1, would leave
 * one colour to everything else.
 */
function fences(values: readonly number[]): [number, number] {
  const sorted = Float64Array.from(values).sort();
  const at = (share: number) => sorted[Math.round(share * (sorted.length - 1))] ?? 0;
  const [first, third] = [at(0.25), at(0.75)];
  const reach = 1.5 * (third - first);
  // Most are the same: then the others are what is worth seeing.
  if (reach === 0) return [Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY];
  return [first - reach, third + reach];
}

/** The worst of a figure over all steps, by layer, with the tensor and the step where it was. */
export function worst(
  series: readonly Schemas['Series'][],
  figure: 'saturated' | 'underflow',
): Map<string, { value: number; tensor: string; step: number | null }> {
  const found = new Map<string, { value: number; tensor: string; step: number | null }>();
  for (const each of series) {
    const name = parseName(each.name);
    if (!name || name.figure !== figure || !each.buckets) continue;
    each.buckets.max.forEach((wire, index) => {
      const value = numberOf(wire);
      const known = found.get(name.layer);
      if (!Number.isFinite(value) || (known && known.value >= value)) return;
      found.set(name.layer, {
        value,
        tensor: name.tensor,
        step: each.buckets?.max_step[index] ?? null,
      });
    });
  }
  return found;
}

/**
 * Under which name the figures of each row of the conversion report are, by the row's name. That is its own, but for
 * layers that a fused block computes as one: their GEMM has a name in the half of the block that is no layer's
 * (`self_attn.qkv_proj`). `seen`: the names that there are figures of.
 */
export function watchedNames(
  rows: readonly { [name: string]: unknown }[],
  seen: ReadonlySet<string>,
): Map<string, string> {
  const own = new Set(rows.map((row) => String(row.name)));
  const joined = new Map<string, string>();
  for (const layer of seen) {
    if (own.has(layer) || layer.endsWith('.core_attention')) continue;
    joined.set(parentOf(layer), layer);
  }
  return new Map(
    rows.map((row) => {
      const name = String(row.name);
      const norm = /norm/i.test(String(row.from));
      const gemm = seen.has(name) || norm ? undefined : joined.get(String(row.group));
      return [name, gemm ?? name];
    }),
  );
}

/** The cell's layer, steps and value in words, the latter as `format` writes it. */
export function readingOf(
  heat: Heat,
  { column, row }: { column: number; row: number },
  format: (value: number) => string,
): string {
  const is = ([x, y]: readonly number[]) => x === column && y === row;
  const first = heat.steps[column] ?? 0;
  const whole = (step: number) => step.toLocaleString('en-US');
  const steps =
    heat.width === 1
      ? `step ${whole(first)}`
      : `steps ${whole(first)} to ${whole(first + heat.width - 1)}`;
  const value = heat.cells.find(is)?.[3];
  const said = [
    ...(value === undefined ? [] : [format(value)]),
    ...(heat.notFinite.some(is) ? ['not finite'] : []),
  ];
  return `${heat.layers[row]}, ${steps}: ${said.join(', and ') || 'nothing recorded'}`;
}

const UNWATCHED = new Set(['mxfp8', 'nvfp4']);

/** Why a job's tensors are not watched; null where they are. */
export function unwatched(spec: { [name: string]: unknown }): string | null {
  const { engine, scaling = '' } = (spec.recipe ?? {}) as { engine?: string; scaling?: string };
  const { fp8_every_steps } = (spec.telemetry ?? {}) as { fp8_every_steps?: number };
  if (engine === 'amp') return 'The engine amp scales no tensors: there is nothing to watch.';
  if (UNWATCHED.has(scaling)) return `The scaling ${scaling} has no figures of health yet.`;
  if (fp8_every_steps === 0)
    return 'FP8 health is off: telemetry.fp8_every_steps is 0 in the spec.';
  return null;
}

export interface Alarm {
  seq: number;
  step: number;
  layer: string;
  tensor: string;
  what: string;
  message: string;
  attempt: number | null;
}

/** Events of the kind `fp8_alarm` that can be linked to a layer and a step. */
export function alarmsOf(events: readonly Schemas['EventObject'][]): Alarm[] {
  return events.flatMap(({ seq, kind, data, message, attempt }) => {
    const { step, layer, tensor, what } = data as Record<string, unknown>;
    if (kind !== 'fp8_alarm' || typeof step !== 'number' || typeof layer !== 'string') return [];
    return [{ seq, step, layer, tensor: String(tensor), what: String(what), message, attempt }];
  });
}
