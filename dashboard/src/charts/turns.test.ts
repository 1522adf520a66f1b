import { describe, expect, it } from 'vitest';
import { takeTurn } from './turns';

/** Lets tasks that wait go first. */
const task = () => new Promise((done) => setTimeout(done, 0));

describe('takeTurn', () => {
  it('does one piece a task, in order, and none that was taken back', async () => {
    const done: string[] = [];
    // What a piece leaves to its task's end comes before the next piece.
    const piece = (name: string) => () => {
      done.push(name);
      queueMicrotask(() => done.push(`after ${name}`));
    };
    takeTurn(piece('a'));
    const back = takeTurn(piece('never'));
    takeTurn(piece('b'));
    back();
    expect(done).toEqual([]);
    for (let tasks = 0; tasks < 100 && done.length < 4; tasks += 1) await task();
    expect(done).toEqual(['a', 'after a', 'b', 'after b']);
    takeTurn(piece('c'));
    for (let tasks = 0; tasks < 100 && done.length < 6; tasks += 1) await task();
    expect(done.slice(4)).toEqual(['c', 'after c']);
  });
});
