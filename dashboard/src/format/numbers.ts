/** Numbers as people read them. The API carries NaN and the infinities as strings. */

export type Wire = number | string | null | undefined;

/** A value in words, in as many significant digits as it likes or as are asked for. */
export type Format = (value: number | null, digits?: number) => string;

// Making one takes far longer than using it.
const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 20 });

/** The number that a value of the wire stands for. */
export function numberOf(value: Wire): number {
  if (typeof value === 'number') return value;
  if (value === 'Infinity') return Number.POSITIVE_INFINITY;
  if (value === '-Infinity') return Number.NEGATIVE_INFINITY;
  return Number.NaN;
}

/** Four significant digits; exponents where the plain number would be long. */
export function formatNumber(value: Wire, digits = 4): string {
  if (value === null || value === undefined) return '–';
  const number = numberOf(value);
  if (Number.isNaN(number)) return 'NaN';
  if (!Number.isFinite(number)) return number > 0 ? '∞' : '−∞';
  if (number === 0) return '0';
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-3)
    return number
      .toExponential(Math.min(digits - 1, 2))
      .replace(/\.?0*e\+?/, 'e')
      .replaceAll('-', '−');
  const told = Number.isInteger(number) ? number : Number(number.toPrecision(digits));
  return (size < 1000 ? String(told) : grouped.format(told)).replace('-', '−');
}

/**
 * A value beside an axis whose values stand `increment` apart: with the decimals that tell it from
 * the next, 5.8975 below 5.9000.
 */
export function formatTick(value: number, increment: number): string {
  if (value === 0 || Math.abs(value) >= 1e6 || !(increment >= 1e-4)) return formatNumber(value);
  const [, decimals = ''] = String(Number(increment.toPrecision(3))).split('.');
  return value
    .toLocaleString('en-US', {
      minimumFractionDigits: decimals.length,
      maximumFractionDigits: decimals.length,
    })
    .replace('-', '−');
}

/** 12345 as 12.3k: for narrow places. */
export function formatCompact(value: Wire, digits = 3): string {
  if (value === null || value === undefined) return '–';
  const number = numberOf(value);
  if (!Number.isFinite(number)) return formatNumber(value);
  const size = Math.abs(number);
  for (const [limit, unit] of [
    [1e12, 'T'],
    [1e9, 'G'],
    [1e6, 'M'],
    [1e3, 'k'],
  ] as const) {
    if (size >= limit) return `${Number((number / limit).toPrecision(digits))}${unit}`;
  }
  return formatNumber(number, digits);
}

const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] as const;

/** Bytes in binary units. */
export function formatBytes(value: Wire, digits = 3): string {
  if (value === null || value === undefined) return '–';
  let number = numberOf(value);
  if (!Number.isFinite(number)) return formatNumber(value);
  let unit = 0;
  while (Math.abs(number) >= 1024 && unit < BYTES.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number : Number(number.toPrecision(digits))} ${BYTES[unit]}`;
}

/** A fraction as per cent. Something that is not zero never reads as zero. */
export function formatPercent(fraction: Wire, digits = 3): string {
  if (fraction === null || fraction === undefined) return '–';
  const number = numberOf(fraction) * 100;
  if (!Number.isFinite(number)) return formatNumber(fraction);
  if (number === 0) return '0 %';
  if (Math.abs(number) < 0.001) return `${number > 0 ? '< 0.001' : '> −0.001'} %`;
  return `${String(Number(number.toPrecision(digits))).replace('-', '−')} %`;
}

/** A ratio such as 1.42× or 1.00×. */
export function formatRatio(ratio: Wire): string {
  if (ratio === null || ratio === undefined) return '–';
  const number = numberOf(ratio);
  return Number.isFinite(number) ? `${number < 100 ? number.toFixed(2) : number.toFixed(0)}×` : '–';
}

/** A number of things: 1 alarm, 1,200 alarms. */
export function counted(count: number, thing: string): string {
  return `${count.toLocaleString('en-US')} ${thing}${count === 1 ? '' : 's'}`;
}
