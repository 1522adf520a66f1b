import { type ReactNode, useMemo } from 'react';
import type { Format } from '~/format/numbers';
import { Chart, type Line, type Mark } from './Chart';
import type { XAxis } from './curves';
import { type ChartView, useSpan } from './useChartView';

const AXES: [XAxis, string][] = [
  ['step', 'Step'],
  ['time', 'Time'],
  ['tokens', 'Tokens'],
];
const SMOOTHING = [0, 0.6, 0.9, 0.98];

/** Lines over one axis, with a title. */
export interface Panel {
  title: string;
  lines: Line[];
  /** Whether the switch of the log axis is for it. */
  log?: boolean;
  /** Whether its axis of values begins at zero: where sizes are compared. */
  zero?: boolean;
  format?: Format;
  actions?: ReactNode;
}

/** What all charts of a page have in common. */
export function ChartControls({ view, children }: { view: ChartView; children?: ReactNode }) {
  return (
    <div className="row controls">
      <fieldset className="segmented" aria-label="Horizontal axis">
        {AXES.map(([value, label]) => (
          <button
            key={value}
            type="button"
            aria-pressed={view.axis === value}
            onClick={() => view.setAxis(value)}
          >
            {label}
          </button>
        ))}
      </fieldset>
      <label className="check">
        Smoothing
        <select
          className="select small"
          value={view.smoothing}
          onChange={(event) => view.setSmoothing(Number(event.target.value))}
        >
          {SMOOTHING.map((weight) => (
            <option key={weight} value={weight}>
              {weight === 0 ? 'none' : weight}
            </option>
          ))}
        </select>
      </label>
      <label className="check">
        <input
          type="checkbox"
          checked={view.log}
          onChange={(event) => view.setLog(event.target.checked)}
        />
        Log axis of loss and norm
      </label>
      {children}
      {view.zoom && (
        <button type="button" className="button small" onClick={() => view.setZoom(null)}>
          Show all steps
        </button>
      )}
    </div>
  );
}

/** Charts with one axis and one cursor. `zoomBy`: how many lines of the first tell what a span holds. */
export function ChartGrid(props: {
  view: ChartView;
  panels: readonly Panel[];
  zoomBy: 'first line' | 'all lines';
  syncKey: string;
  elapsed?: boolean;
  marks?: readonly Mark[];
}) {
  const { view, panels, zoomBy } = props;
  const curves = useMemo(
    () => panels.flatMap(({ lines }) => lines.map(({ curve }) => curve)),
    [panels],
  );
  const reference = useMemo(() => {
    const first = panels[0]?.lines.map(({ curve }) => curve) ?? [];
    return zoomBy === 'first line' ? first.slice(0, 1) : first;
  }, [panels, zoomBy]);
  const { span, onSpan } = useSpan(view, curves, reference);
  return (
    <div className="charts">
      {panels.map((panel) => (
        <Chart
          key={panel.title}
          title={panel.title}
          lines={panel.lines}
          axis={view.axis}
          log={view.log && (panel.log ?? false)}
          zero={panel.zero}
          smoothing={view.smoothing}
          span={span}
          onSpan={onSpan}
          syncKey={props.syncKey}
          actions={panel.actions}
          elapsed={props.elapsed}
          marks={props.marks}
          format={panel.format}
        />
      ))}
    </div>
  );
}
