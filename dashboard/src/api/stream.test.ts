import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { openStream } from './stream';

/** The browser's side of a connection, driven by hand. */
class Source {
  static readonly CLOSED = 2;
  static all: Source[] = [];
  readyState = 0;
  onopen: (() => void) | null = null;
  onerror: (() => void) | null = null;
  readonly handlers = new Map<string, (event: unknown) => void>();

  constructor(readonly url: string) {
    Source.all.push(this);
  }
  addEventListener(name: string, handler: (event: unknown) => void) {
    this.handlers.set(name, handler);
  }
  close() {
    this.readyState = Source.CLOSED;
  }
  tell(name: string, data: unknown, lastEventId = '') {
    this.handlers.get(name)?.({ data: JSON.stringify(data), lastEventId });
  }
  refuse() {
    this.readyState = Source.CLOSED;
    this.onerror?.();
  }
}

const page = { visibilityState: 'visible', listeners: new Set<() => void>() };
function look(state: 'visible' | 'hidden') {
  page.visibilityState = state;
  for (const listener of page.listeners) listener();
}

const FRAME = 16;

beforeEach(() => {
  Source.all = [];
  page.visibilityState = 'visible';
  page.listeners.clear();
  vi.useFakeTimers();
  vi.stubGlobal('EventSource', Source);
  vi.stubGlobal('requestAnimationFrame', (draw: () => void) => setTimeout(draw, FRAME));
  vi.stubGlobal('cancelAnimationFrame', (frame: number) => clearTimeout(frame));
  vi.stubGlobal('document', {
    get visibilityState() {
      return page.visibilityState;
    },
    addEventListener: (_: string, listener: () => void) => page.listeners.add(listener),
    removeEventListener: (_: string, listener: () => void) => page.listeners.delete(listener),
  });
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

const open = (on: Record<string, (data: unknown) => void> = {}, newest: string[] = []) => {
  const live: boolean[] = [];
  const close = openStream({
    path: '/s?include=status',
    after: 7,
    on,
    newest,
    onLive: (up) => live.push(up),
  });
  return { close, live };
};

describe('openStream', () => {
  it('begins behind the given id and hands messages on', () => {
    const heard: unknown[] = [];
    open({ status: (data) => heard.push(data) });
    expect(Source.all[0]?.url).toBe('/s?include=status&after=7');
    Source.all[0]?.tell('status', { a: 1 }, '8');
    vi.advanceTimersByTime(FRAME);
    expect(heard).toEqual([{ a: 1 }]);
  });

  it('tells once a frame, in order, and of what is replaced the newest alone', () => {
    const heard: unknown[] = [];
    const hear = (data: unknown) => heard.push(data);
    open({ status: hear, progress: hear }, ['progress']);
    for (let step = 1; step <= 100; step += 1) Source.all[0]?.tell('progress', step);
    Source.all[0]?.tell('status', 'paused');
    Source.all[0]?.tell('status', 'queued');
    expect(heard).toEqual([]);
    vi.advanceTimersByTime(FRAME);
    expect(heard).toEqual([100, 'paused', 'queued']);
    Source.all[0]?.tell('progress', 101);
    vi.advanceTimersByTime(FRAME);
    expect(heard.at(-1)).toBe(101);
  });

  it('tells what came last before it ends or gives the connection back', () => {
    const heard: unknown[] = [];
    open({ status: (data) => heard.push(data), end: (data) => heard.push(data) });
    look('hidden');
    vi.advanceTimersByTime(4999);
    Source.all[0]?.tell('status', 'running');
    vi.advanceTimersByTime(1);
    expect(heard).toEqual(['running']);
    look('visible');
    Source.all[1]?.tell('status', 'succeeded');
    Source.all[1]?.tell('end', 'ended');
    expect(heard).toEqual(['running', 'succeeded', 'ended']);
  });

  it('tells nothing to those who have closed it', () => {
    const heard: unknown[] = [];
    const { close } = open({ status: (data) => heard.push(data) });
    Source.all[0]?.tell('status', 'running');
    close();
    vi.advanceTimersByTime(60_000);
    expect(heard).toEqual([]);
  });

  it('comes back behind the last id after a refusal, later each time', () => {
    const { live } = open({ status: () => {} });
    Source.all[0]?.onopen?.();
    Source.all[0]?.tell('status', {}, '12');
    Source.all[0]?.refuse();
    expect(live).toEqual([true, false]);
    vi.advanceTimersByTime(999);
    expect(Source.all).toHaveLength(1);
    vi.advanceTimersByTime(1);
    expect(Source.all[1]?.url).toBe('/s?include=status&after=12');
    Source.all[1]?.refuse();
    vi.advanceTimersByTime(1999);
    expect(Source.all).toHaveLength(2);
    vi.advanceTimersByTime(1);
    expect(Source.all).toHaveLength(3);
  });

  it('leaves a broken connection to the browser, which comes back by itself', () => {
    open();
    Source.all[0]?.onerror?.();
    vi.advanceTimersByTime(60_000);
    expect(Source.all).toHaveLength(1);
  });

  it('knows the id that the stream of all jobs begins with', () => {
    open();
    Source.all[0]?.tell('begin', {}, 'x1');
    Source.all[0]?.refuse();
    vi.advanceTimersByTime(1000);
    expect(Source.all[1]?.url).toContain('after=x1');
  });

  it('ends with the job', () => {
    const { live } = open();
    Source.all[0]?.tell('end', {});
    expect(Source.all[0]?.readyState).toBe(Source.CLOSED);
    expect(live.at(-1)).toBe(false);
    look('hidden');
    look('visible');
    vi.advanceTimersByTime(60_000);
    expect(Source.all).toHaveLength(1);
  });

  it('gives the connection back while nobody looks, and goes on where it was', () => {
    open();
    Source.all[0]?.tell('begin', {}, '20');
    look('hidden');
    vi.advanceTimersByTime(4000);
    look('visible');
    vi.advanceTimersByTime(10_000);
    expect(Source.all).toHaveLength(1);
    look('hidden');
    vi.advanceTimersByTime(5000);
    expect(Source.all[0]?.readyState).toBe(Source.CLOSED);
    look('visible');
    expect(Source.all[1]?.url).toContain('after=20');
  });

  it('opens nothing any more once it is closed', () => {
    const { close } = open();
    Source.all[0]?.refuse();
    close();
    vi.advanceTimersByTime(60_000);
    look('visible');
    expect(Source.all).toHaveLength(1);
    expect(page.listeners.size).toBe(0);
  });
});
