import { expect, test } from 'vitest';
import { phaseOf, secondsAtWork } from './trained';

const attempt = (started_at: string | null, ended_at: string | null) => ({
  started_at,
  ended_at,
  phase: 'training',
});

test('the time between attempts is no time at work', () => {
  const now = Date.parse('2026-01-01T12:00:00Z');
  const first = attempt('2026-01-01T10:00:00Z', '2026-01-01T10:01:00Z');
  expect(secondsAtWork([first], now)).toBe(60);
  expect(secondsAtWork([first, attempt('2026-01-01T11:59:30Z', null)], now)).toBe(90);
  // One that nobody has taken yet has not begun.
  expect(secondsAtWork([first, attempt(null, null)], now)).toBe(60);
  expect(secondsAtWork([attempt(null, null)], now)).toBeNull();
});

test('an attempt that has ended is in no phase', () => {
  expect(phaseOf([attempt('2026-01-01T10:00:00Z', '2026-01-01T10:01:00Z')])).toBeNull();
  expect(phaseOf([attempt('2026-01-01T10:00:00Z', null)])).toBe('training');
  expect(phaseOf([])).toBeNull();
});
