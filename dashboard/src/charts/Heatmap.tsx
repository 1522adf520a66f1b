import { HeatmapChart } from 'echarts/charts';
import { GridComponent, MarkPointComponent, VisualMapComponent } from 'echarts/components';
import { type EChartsType, init, use } from 'echarts/core';
import { CanvasRenderer } from 'echarts/renderers';
import { useEffect, useRef } from 'react';
import { useShownTheme } from '~/app/theme';
import { formatCompact } from '~/format/numbers';
import type { Heat } from '~/pages/job/health';

use([HeatmapChart, GridComponent, VisualMapComponent, MarkPointComponent, CanvasRenderer]);

// From cold to hot, told apart by lightness too (after the map "viridis").
const RAMP = ['#440154', '#3b528b', '#21918c', '#5ec962', '#fde725'];
// Shares: nothing is quiet, much is loud.
const SHARES = {
  light: ['#eef2f6', '#fbd38d', '#ea7a2d', '#b42318', '#5c0f0a'],
  dark: ['#1e2731', '#6b4a14', '#c2601c', '#f0604f', '#ffd0c9'],
};

export interface Spot {
  layer: string;
  step: number;
}

/** Layers down, steps across. Cells that were not finite stand out in the colour of errors. */
export default function Heatmap(props: {
  heat: Heat;
  log: boolean;
  label: string;
  spot: Spot | null;
  format: (value: number) => string;
  onHover: (cell: { layer: string; step: number; value: number | null } | null) => void;
  onPick: (spot: Spot) => void;
}) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<EChartsType | null>(null);
  const theme = useShownTheme();
  const now = useRef(props);
  now.current = props;
  const { heat, log, spot } = props;
  const height = Math.min(1400, Math.max(160, heat.layers.length * 18)) + 70;

  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const made = init(element, undefined, { renderer: 'canvas' });
    chart.current = made;
    const cellOf = (event: { data?: unknown }) => {
      const [x, y, , value] = event.data as [number, number, number, number | undefined];
      const { layers, steps } = now.current.heat;
      return { layer: layers[y] ?? '', step: steps[x] ?? 0, value: value ?? null };
    };
    made.on('mouseover', { seriesType: 'heatmap' }, (event) => now.current.onHover(cellOf(event)));
    made.on('globalout', () => now.current.onHover(null));
    made.on('click', { seriesType: 'heatmap' }, (event) => now.current.onPick(cellOf(event)));
    const watcher = new ResizeObserver(() => made.resize());
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      // A picture that is still being drawn in slices must not go on after its end.
      made.clear();
      made.getZr().refreshImmediately();
      made.dispose();
      chart.current = null;
    };
  }, []);

  useEffect(() => {
    const element = place.current;
    if (!element || !chart.current) return;
    const style = getComputedStyle(element);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const text = colour('--chart-axis');
    const narrow = element.clientWidth < 640;
    const row = spot ? heat.layers.indexOf(spot.layer) : -1;
    const column = spot ? columnOf(heat, spot.step) : -1;
    const short = (name: string) => (narrow && name.length > 16 ? `…${name.slice(-15)}` : name);
    chart.current.setOption(
      {
        animation: false,
        textStyle: { fontFamily: colour('--font') },
        grid: { left: 8, right: 8, top: 8, bottom: 58, containLabel: true },
        xAxis: {
          type: 'category',
          data: heat.steps,
          axisLabel: { color: text, formatter: (step: string) => formatCompact(Number(step)) },
          axisTick: { show: false },
          axisLine: { lineStyle: { color: colour('--line') } },
        },
        yAxis: {
          type: 'category',
          inverse: true,
          data: heat.layers,
          axisLabel: { color: text, fontSize: 11, formatter: short },
          axisTick: { show: false },
          axisLine: { show: false },
        },
        visualMap: [
          {
            seriesIndex: 0,
            dimension: 2,
            min: heat.low,
            max: heat.high,
            calculable: !narrow,
            orient: 'horizontal',
            left: 'center',
            bottom: 2,
            itemHeight: 160,
            itemWidth: 12,
            textStyle: { color: text },
            formatter: (value: number) => now.current.format(log ? 2 ** value : value),
            inRange: { color: log ? RAMP : SHARES[theme] },
          },
          {
            seriesIndex: 1,
            dimension: 2,
            show: false,
            min: 0,
            max: 1,
            inRange: { color: [colour('--bad'), colour('--bad')] },
          },
        ],
        series: [
          {
            type: 'heatmap',
            data: heat.cells,
            progressive: 4000,
            emphasis: { itemStyle: { borderColor: colour('--text'), borderWidth: 1 } },
            markPoint: {
              silent: true,
              symbol: 'rect',
              symbolSize: [14, 14],
              itemStyle: { color: 'transparent', borderColor: colour('--bad'), borderWidth: 3 },
              label: { show: false },
              data: row >= 0 && column >= 0 ? [{ coord: [column, row] }] : [],
            },
          },
          { type: 'heatmap', data: heat.notFinite.map(([x, y]) => [x, y, 1]) },
        ],
      },
      { notMerge: true },
    );
  }, [heat, log, theme, spot]);

  return (
    <div ref={place} className="heatmap" style={{ height }} role="img" aria-label={props.label} />
  );
}

/** The column that holds a step; the last one before it where it is between two. */
function columnOf(heat: Heat, step: number): number {
  let found = -1;
  heat.steps.forEach((first, index) => {
    if (first <= step) found = index;
  });
  return found;
}
