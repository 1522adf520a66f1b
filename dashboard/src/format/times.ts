/** Times in the viewer's own time zone, and durations. */

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;

/** 12 s, 3 min 4 s, 2 h 5 min, 3 d 4 h: the two largest units. */
export function formatDuration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  const whole = Math.max(0, Math.round(seconds));
  if (seconds > 0 && seconds < 1) return '< 1 s';
  const parts: [number, string][] = [
    [Math.floor(whole / DAY), 'd'],
    [Math.floor((whole % DAY) / HOUR), 'h'],
    [Math.floor((whole % HOUR) / MINUTE), 'min'],
    [whole % MINUTE, 's'],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  if (first === -1) return '0 s';
  return parts
    .slice(first, first + 2)
    .filter(([count]) => count > 0)
    .map(([count, unit]) => `${count} ${unit}`)
    .join(' ');
}

/** The largest unit alone: 12 s, 3 min, 2 h, 4 d. */
export function formatAge(seconds: number | null | undefined): string {
  const duration = formatDuration(seconds);
  return duration.startsWith('<') ? duration : duration.split(' ').slice(0, 2).join(' ');
}

/** Seconds from a time of the API until `now` (both in the same clock's words). */
export function secondsSince(
  time: string | null | undefined,
  now: number = Date.now(),
): number | null {
  if (!time) return null;
  const at = Date.parse(time);
  return Number.isNaN(at) ? null : Math.max(0, (now - at) / 1000);
}

// Making one takes far longer than using it, and long lists use it hundreds of times.
const formats = new Map<string, Intl.DateTimeFormat>();

function formatOf(options: Intl.DateTimeFormatOptions): Intl.DateTimeFormat {
  const key = JSON.stringify(options);
  const known = formats.get(key) ?? new Intl.DateTimeFormat('en-GB', options);
  formats.set(key, known);
  return known;
}

/** A time of the API (RFC 3339, or seconds since the epoch) in the given or the viewer's zone. */
export function formatTime(time: string | number | null | undefined, timeZone?: string): string {
  if (time === null || time === undefined) return '–';
  const date = new Date(typeof time === 'number' ? time * 1000 : time);
  if (Number.isNaN(date.getTime())) return '–';
  return formatOf({
    year: 'numeric',
    month: 'short',
    day: '2-digit',
    hour: '2-digit',
    minute: '2-digit',
    second: '2-digit',
    timeZone,
  }).format(date);
}

/** The hour alone, for lines of a log. */
export function formatClock(time: string | number, timeZone?: string): string {
  const date = new Date(typeof time === 'number' ? time * 1000 : time);
  return formatOf({
    hour: '2-digit',
    minute: '2-digit',
    second: '2-digit',
    timeZone,
  }).format(date);
}

/** The viewer's time zone, to be said beside times. */
export function viewerZone(): string {
  return Intl.DateTimeFormat().resolvedOptions().timeZone;
}
