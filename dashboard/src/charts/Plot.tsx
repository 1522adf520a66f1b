import { memo, useEffect, useMemo, useRef } from 'react';
import uPlot from 'uplot';
import 'uplot/dist/uPlot.min.css';
import { useShownTheme } from '~/app/theme';
import { type Format, formatNumber } from '~/format/numbers';
import type { XAxis } from './curves';
import { dataOf, type Line, type Mark } from './lines';
import { optionsOf } from './options';
import { readoutOf, summary } from './readout';
import { steer } from './steer';
import { colourReader } from './style';

export interface PlotProps {
  title: string;
  lines: readonly Line[];
  axis: XAxis;
  /** Whether times are seconds since each curve's beginning, and not moments. */
  elapsed?: boolean;
  log?: boolean;
  /** Whether the axis of values begins at zero. */
  zero?: boolean;
  smoothing?: number;
  marks?: readonly Mark[];
  /** The span of the axis that is shown; null: all. */
  span?: [number, number] | null;
  onSpan?: (span: [number, number] | null) => void;
  format?: Format;
  /** Charts of one key share their cursor. */
  syncKey: string;
}

/** The canvas of a chart, and below it the values at the cursor. */
export const Plot = memo(function Plot(props: PlotProps & { height: number }) {
  const place = useRef<HTMLDivElement>(null);
  const readout = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const theme = useShownTheme();
  const { lines, axis, elapsed = false, log = false, zero = false } = props;
  const { smoothing = 0, height, syncKey } = props;
  const format = props.format ?? formatNumber;

  const data = useMemo(() => dataOf(lines, axis, log, smoothing), [lines, axis, log, smoothing]);
  // What the plot's callbacks read, so that new data needs no new plot.
  const now = useRef({ ...props, format, data });
  now.current = { ...props, format, data };

  // The plot is made anew only when its shape changes; new points are set.
  const shape = JSON.stringify([
    lines.map(({ label, colour, dashed, band, steady }) => [label, colour, dashed, band, steady]),
    axis,
    elapsed,
    log,
    zero,
    smoothing > 0,
    theme,
    syncKey,
  ]);
  const shown = useRef<Pick<PlotProps, 'span' | 'marks'> & { data: unknown }>({ data });
  // biome-ignore lint/correctness/useExhaustiveDependencies: `shape` names all that matters
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const tell = (chart: uPlot) => {
      // The newest values while the cursor is elsewhere.
      const at = chart.data[0][chart.cursor.idx ?? chart.data[0].length - 1];
      if (readout.current)
        readout.current.textContent = at === undefined ? '' : readoutOf(at, now.current);
    };
    const width = Math.max(200, element.clientWidth);
    const chart = new uPlot(
      optionsOf(
        { lines, axis, elapsed, log, zero, smoothed: smoothing > 0, width, height, syncKey },
        () => now.current,
        colourReader(element),
        tell,
      ),
      now.current.data as uPlot.AlignedData,
      element,
    );
    plot.current = chart;
    shown.current = now.current;
    tell(chart);
    const watcher = new ResizeObserver(() => {
      const room = Math.max(200, element.clientWidth);
      // It tells of the size that there is already, too; drawing that again would be for nothing.
      if (room !== chart.width) chart.setSize({ width: room, height });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, height]);

  const { span, marks } = props;
  useEffect(() => {
    const before = shown.current;
    shown.current = { data, span, marks };
    // Setting the same data makes the axis ask for its span again.
    if (before.data !== data || before.span !== span) {
      plot.current?.setData(data as uPlot.AlignedData);
    } else if (before.marks !== marks) plot.current?.redraw(false);
  }, [data, span, marks]);

  return (
    <>
      <div
        ref={place}
        className="plot"
        tabIndex={0}
        role="group"
        aria-label={summary({ ...props, format })}
        onKeyDown={(event) => {
          const chart = plot.current;
          if (chart && steer(chart, event.key, now.current.onSpan)) event.preventDefault();
        }}
        onFocus={() => readout.current?.setAttribute('aria-live', 'polite')}
        onBlur={() => readout.current?.setAttribute('aria-live', 'off')}
      />
      <div ref={readout} className="readout" aria-live="off" />
    </>
  );
});
