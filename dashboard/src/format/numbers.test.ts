import { describe, expect, it } from 'vitest';
import {
  counted,
  formatBytes,
  formatCompact,
  formatNumber,
  formatPercent,
  formatRatio,
  numberOf,
} from './numbers';

describe('numberOf', () => {
  it('reads what JSON cannot say', () => {
    expect(numberOf('NaN')).toBeNaN();
    expect(numberOf('Infinity')).toBe(Number.POSITIVE_INFINITY);
    expect(numberOf('-Infinity')).toBe(Number.NEGATIVE_INFINITY);
    expect(numberOf(null)).toBeNaN();
    expect(numberOf(2.5)).toBe(2.5);
  });
});

describe('formatNumber', () => {
  it.each([
    [0, '0'],
    [null, '–'],
    ['NaN', 'NaN'],
    ['Infinity', '∞'],
    ['-Infinity', '−∞'],
    [2.123456, '2.123'],
    [-2.5, '−2.5'],
    [12345, '12,345'],
    [3e-4, '3.00e−4'],
    [1.5e9, '1.50e9'],
    [0.001, '0.001'],
  ])('%s is %s', (value, text) => expect(formatNumber(value)).toBe(text));
});

describe('units', () => {
  it('shortens', () => {
    expect(formatCompact(999)).toBe('999');
    expect(formatCompact(12345)).toBe('12.3k');
    expect(formatCompact(2_000_000_000)).toBe('2G');
    expect(formatCompact('NaN')).toBe('NaN');
  });
  it('counts bytes by 1024', () => {
    expect(formatBytes(1023)).toBe('1023 B');
    expect(formatBytes(1024)).toBe('1 KiB');
    expect(formatBytes(139 * 2 ** 30)).toBe('139 GiB');
  });
  it('never calls a small share zero', () => {
    expect(formatPercent(0)).toBe('0 %');
    expect(formatPercent(1e-9)).toBe('< 0.001 %');
    expect(formatPercent(-1e-9)).toBe('> −0.001 %');
    expect(formatPercent(0.12345)).toBe('12.3 %');
    expect(formatPercent(null)).toBe('–');
  });
  it('counts things', () => {
    expect([0, 1, 1200].map((count) => counted(count, 'alarm'))).toEqual([
      '0 alarms',
      '1 alarm',
      '1,200 alarms',
    ]);
  });
  it('writes ratios', () => {
    expect(formatRatio(1.4234)).toBe('1.42×');
    expect(formatRatio(1.0019)).toBe('1.00×');
    expect(formatRatio(250.4)).toBe('250×');
  });
});
