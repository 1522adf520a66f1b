/** One live stream of the service: goes on where it broke off, however it broke off. */

export interface StreamOptions {
  /** Path and query, without `after`. */
  path: string;
  /** The id to begin behind; without it the stream's own beginning. */
  after?: string | number;
  /** Handlers by the names of the messages. They are called once a frame, for all that came since. */
  on: Record<string, (data: unknown) => void>;
  /** Names of messages of which, of those in one frame, the newest says all. */
  newest?: readonly string[];
  /** Told whenever the connection comes or goes. */
  onLive?: (live: boolean) => void;
}

// A browser has six connections to a host: pages that nobody looks at give theirs back.
const HIDDEN_PAUSE = 5000;
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 30_000;

/** Opens the stream; the answer closes it. */
export function openStream(options: StreamOptions): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let last = options.after === undefined ? null : String(options.after);
  let hiding: ReturnType<typeof setTimeout> | undefined;
  let pause = FIRST_PAUSE;
  let closed = false;
  let waiting: { name: string; data: string }[] = [];
  let frame: number | undefined;
  const newest = new Set(options.newest);

  // A burst of messages is one change of the page, not hundreds.
  function hear(name: string, data: string): void {
    if (newest.has(name)) waiting = waiting.filter((other) => other.name !== name);
    waiting.push({ name, data });
    frame ??= requestAnimationFrame(tell);
  }

  function tell(): void {
    if (frame !== undefined) cancelAnimationFrame(frame);
    frame = undefined;
    const told = waiting;
    waiting = [];
    for (const { name, data } of told) {
      if (!closed) options.on[name]?.(JSON.parse(data));
    }
  }

  function close(): void {
    closed = true;
    if (frame !== undefined) cancelAnimationFrame(frame);
    clearTimeout(timer);
    clearTimeout(hiding);
    document.removeEventListener('visibilitychange', onVisibility);
    source?.close();
    options.onLive?.(false);
  }

  function open(): void {
    const glue = options.path.includes('?') ? '&' : '?';
    const where = last === null ? '' : `${glue}after=${encodeURIComponent(last)}`;
    const current = new EventSource(`${options.path}${where}`);
    source = current;
    current.onopen = () => {
      pause = FIRST_PAUSE;
      options.onLive?.(true);
    };
    // The browser comes back by itself after a broken connection, but not after a refusal.
    current.onerror = () => {
      options.onLive?.(false);
      if (closed || current.readyState !== EventSource.CLOSED) return;
      timer = setTimeout(open, pause);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    };
    for (const name of new Set([...Object.keys(options.on), 'begin', 'reset', 'end'])) {
      current.addEventListener(name, (event) => {
        const message = event as MessageEvent<string>;
        if (message.lastEventId) last = message.lastEventId;
        if (options.on[name]) hear(name, message.data);
        if (name === 'end') {
          tell();
          close();
        }
      });
    }
  }

  function onVisibility(): void {
    clearTimeout(hiding);
    if (document.visibilityState === 'hidden') {
      hiding = setTimeout(() => {
        clearTimeout(timer);
        source?.close();
        // Frames are not drawn now; what came last is told all the same.
        tell();
        source = null;
        options.onLive?.(false);
      }, HIDDEN_PAUSE);
    } else if (source === null && !closed) {
      open();
    }
  }

  document.addEventListener('visibilitychange', onVisibility);
  open();
  return close;
}
