import { describe, expect, it } from 'vitest';
import {
  counted,
  formatBytes,
  formatCompact,
  formatNumber,
  formatPercent,
  formatRatio,
  formatTick,
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
    [143_800.4, '143,800'],
    [-1234.5, '−1,235'],
    [3e-4, '3e−4'],
    [3.204e-4, '3.2e−4'],
    [1.5e9, '1.5e9'],
    [1e10, '1e10'],
    [-2e-10, '−2e−10'],
    [0.001, '0.001'],
  ])('%s is %s', (value, text) => expect(formatNumber(value)).toBe(text));
});

describe('formatTick', () => {
  it('tells the values of an axis apart', () => {
    const ticks = [5.8925, 5.895, 5.8975, 5.9, 5.9025].map((tick) => formatTick(tick, 0.0025));
    expect(ticks).toEqual(['5.8925', '5.8950', '5.8975', '5.9000', '5.9025']);
    expect([0, 0.25, -0.5].map((tick) => formatTick(tick, 0.25))).toEqual(['0', '0.25', '−0.50']);
    expect([1000, 1500].map((tick) => formatTick(tick, 500))).toEqual(['1,000', '1,500']);
    expect([5e-6, 1e-5].map((tick) => formatTick(tick, 5e-6))).toEqual(['5e−6', '1e−5']);
    expect(formatTick(2e6, 5e5)).toBe('2e6');
  });
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
