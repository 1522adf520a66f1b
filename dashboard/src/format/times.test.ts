import { describe, expect, it } from 'vitest';
import { formatAge, formatClock, formatDuration, formatTime, secondsSince } from './times';

describe('durations', () => {
  it.each([
    [0, '0 s'],
    [0.2, '< 1 s'],
    [59.6, '1 min'],
    [184, '3 min 4 s'],
    [7200, '2 h'],
    [3600 + 5, '1 h'],
    [90_061, '1 d 1 h'],
    [null, '–'],
    [Number.NaN, '–'],
  ])('%s seconds are %s', (seconds, text) => expect(formatDuration(seconds)).toBe(text));
  it('keeps the largest unit of an age', () => {
    expect(formatAge(184)).toBe('3 min');
    expect(formatAge(90_061)).toBe('1 d');
    expect(formatAge(0.4)).toBe('< 1 s');
  });
});

describe('moments', () => {
  it('shows the zone that is asked for, over its change of day', () => {
    const time = '2026-03-01T23:30:00Z';
    expect(formatTime(time, 'UTC')).toBe('01 Mar 2026, 23:30:00');
    expect(formatTime(time, 'Asia/Kolkata')).toBe('02 Mar 2026, 05:00:00');
    expect(formatTime(Date.parse(time) / 1000, 'UTC')).toBe('01 Mar 2026, 23:30:00');
    expect(formatClock(time, 'America/New_York')).toBe('18:30:00');
  });
  it('says nothing of what is no time', () => {
    expect(formatTime('soon')).toBe('–');
    expect(formatTime(null)).toBe('–');
  });
  it('counts from a moment, never below zero', () => {
    const now = Date.parse('2026-01-01T00:01:00Z');
    expect(secondsSince('2026-01-01T00:00:00Z', now)).toBe(60);
    expect(secondsSince('2026-01-01T00:02:00Z', now)).toBe(0);
    expect(secondsSince(null, now)).toBeNull();
  });
});
