import { describe, expect, test } from 'vitest';
import { type Held, heldOf, KEPT, withNews, withOlder } from './logLines';

const lines = (from: number, to: number) =>
  Array.from({ length: to - from + 1 }, (_, index) => ({
    seq: from + index,
    time: 1_767_225_600,
    stream: 'stdout' as const,
    attempt: 1,
    rank: null,
    level: null,
    text: `line ${from + index}`,
  }));
const seqs = (held: Held) => held.lines.map(({ seq }) => seq);
const whole = (from: number, to: number) => lines(from, to).map(({ seq }) => seq);

describe('the lines that a page of a log holds', () => {
  test('news are put behind, each once', () => {
    const held = withNews(heldOf({ lines: lines(1, 3), next_before: null }), lines(2, 5), true);
    expect(seqs(held)).toEqual([1, 2, 3, 4, 5]);
    expect(held.before).toBeNull();
    expect(withNews(held, lines(4, 5), true)).toBe(held);
  });

  test('what is let go at the beginning can be read again, without a gap', () => {
    let held = heldOf({ lines: lines(1001, 2000), next_before: 1001 });
    held = withNews(held, lines(2001, KEPT + 1500), true);
    expect(seqs(held)).toEqual(whole(1501, KEPT + 1500));
    expect(held.before).toBe(1501);
    // The service sends the last lines before that number.
    held = withOlder(held, 1501, { lines: lines(501, 1500), next_before: 501 });
    expect(seqs(held)).toEqual(whole(501, KEPT + 1500));
    expect(held.before).toBe(501);
    // An answer that is late leaves no gap and no line twice.
    expect(withOlder(held, 1501, { lines: lines(501, 1500), next_before: 501 })).toBe(held);
  });

  test('a whole log that grows too long has a beginning to be read', () => {
    const held = withNews(
      heldOf({ lines: lines(1, 10), next_before: null }),
      lines(11, KEPT + 1),
      true,
    );
    expect(held.before).toBe(2);
  });

  test('from one who looks back nothing is taken', () => {
    const full = withNews(heldOf({ lines: [], next_before: null }), lines(1, KEPT), false);
    expect(full.lines.length).toBe(KEPT);
    const held = withNews(full, lines(KEPT + 1, KEPT + 9), false);
    expect(held).toEqual({ ...full, behind: true });
    // Lines that come after those would leave a gap between.
    expect(withNews(held, lines(KEPT + 10, KEPT + 11), true)).toBe(held);
  });
});
