import { memo, type ReactNode, useEffect, useRef, useState } from 'react';
import { flushSync } from 'react-dom';
import { useMediaQuery } from '~/app/useMediaQuery';
import { Name } from '~/components/Name';
import { counted } from '~/format/numbers';
import { brokenPoints } from './lines';
import { Plot, type PlotProps } from './Plot';
import { takeTurn } from './turns';

export type { Line, Mark } from './lines';

// Charts so far below the window are drawn before they are scrolled to.
const AHEAD = '240px';

/**
 * A chart of curves. It is drawn when it comes into view, and follows its data while it is there;
 * what changes meanwhile elsewhere costs nothing. Charts take turns, so that many at once leave the
 * page free for its user.
 */
export const Chart = memo(function Chart(
  props: PlotProps & { height?: number; actions?: ReactNode },
) {
  const { actions, height: fixed, ...plot } = props;
  const frame = useRef<HTMLElement>(null);
  const roomy = useMediaQuery('(min-width: 2400px)');
  const height = fixed ?? (roomy ? 320 : 220);
  const [near, setNear] = useState(false);
  const [drawn, setDrawn] = useState<PlotProps | null>(null);
  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    const watcher = new IntersectionObserver(
      (entries) => setNear(entries.at(-1)?.isIntersecting ?? false),
      { rootMargin: AHEAD },
    );
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);
  const {
    title,
    lines,
    axis,
    elapsed,
    log,
    zero,
    smoothing,
    marks,
    span,
    onSpan,
    format,
    syncKey,
  } = plot;
  // biome-ignore lint/correctness/useExhaustiveDependencies: `plot` is made of these props
  useEffect(() => {
    if (near) return takeTurn(() => flushSync(() => setDrawn(plot)));
  }, [
    near,
    title,
    lines,
    axis,
    elapsed,
    log,
    zero,
    smoothing,
    marks,
    span,
    onSpan,
    format,
    syncKey,
  ]);
  const broken = lines.reduce((count, line) => count + brokenPoints(line), 0);
  return (
    <figure className="card chart" ref={frame}>
      <figcaption className="chart-head">
        <h2>{title}</h2>
        {lines.length > 1 && (
          <span className="chart-key">
            {lines.map(({ label, colour, dashed }) => (
              <span key={`${label}${colour}`}>
                <span
                  className={dashed ? 'stroke dashed' : 'stroke'}
                  style={{ borderColor: `var(${colour})` }}
                />
                <Name>{label}</Name>
              </span>
            ))}
          </span>
        )}
        {broken > 0 && (
          <span className="bad-text" title="NaN or infinite, where a red line goes down">
            {counted(broken, 'point')} not finite
          </span>
        )}
        <span className="chart-actions">{actions}</span>
      </figcaption>
      {drawn ? <Plot {...drawn} height={height} /> : <div style={{ height: height + 24 }} />}
    </figure>
  );
});
