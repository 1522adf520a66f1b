import { useCallback, useMemo, useState } from 'react';
import { type Curve, spanOf, stepsOf, type XAxis } from './curves';

type Span = [number, number];

/** How all charts of a page are shown: their axis, smoothing and zoom. */
export function useChartView() {
  const [axis, chooseAxis] = useState<XAxis>('step');
  const [log, setLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const [zoom, setZoom] = useState<{ span: Span; steps: Span } | null>(null);
  const setAxis = useCallback((next: XAxis) => {
    chooseAxis(next);
    // A span of steps is none of times.
    setZoom(null);
  }, []);
  return { axis, setAxis, log, setLog, smoothing, setSmoothing, zoom, setZoom };
}

export type ChartView = ReturnType<typeof useChartView>;

/**
 * The span of the axis that all charts show, also those whose curve ends before, and what zooms:
 * `reference` are the curves whose points tell which steps a span holds.
 */
export function useSpan(
  { axis, zoom, setZoom }: ChartView,
  curves: readonly Curve[],
  reference: readonly Curve[],
) {
  const all = useMemo(() => spanOf(curves, axis), [curves, axis]);
  const onSpan = useCallback(
    (span: Span | null) => {
      if (span === null) {
        setZoom(null);
        return;
      }
      const covered = reference.flatMap((curve) => {
        const steps = stepsOf(curve, axis, span[0], span[1]);
        return steps ? [steps] : [];
      });
      if (covered.length === 0) return;
      const first = Math.min(...covered.map(([step]) => step));
      const last = Math.max(...covered.map(([, step]) => step));
      setZoom({ span, steps: [first, last] });
    },
    [reference, axis, setZoom],
  );
  return { span: zoom?.span ?? all, onSpan };
}
