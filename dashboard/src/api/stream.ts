/** One live stream of the service: goes on where it broke off, however it broke off. */

export interface StreamOptions {
  /** Path and query, without `after`. */
  path: string;
  /** The id to begin behind; without it the stream's own beginning. */
  after?: string | number;
  /** Handlers by the names of the messages. */
  on: Record<string, (data: unknown) => void>;
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

  function close(): void {
    closed = true;
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
        options.on[name]?.(JSON.parse(message.data));
        if (name === 'end') close();
      });
    }
  }

  function onVisibility(): void {
    clearTimeout(hiding);
    if (document.visibilityState === 'hidden') {
      hiding = setTimeout(() => {
        clearTimeout(timer);
        source?.close();
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
