import { type PointerEvent, useEffect, useMemo, useRef, useState } from 'react';
import { useShownTheme } from '~/app/theme';
import { formatCompact } from '~/format/numbers';
import type { Heat } from '~/pages/job/health';
import { bytesOf, columnOf, labelEvery, pixelsOf } from './heatPicture';

// From cold to hot, told apart by lightness too (after the map "viridis").
const RAMP = ['#440154', '#3b528b', '#21918c', '#5ec962', '#fde725'];
// Shares: nothing is quiet, much is loud.
const SHARES = {
  light: ['#eef2f6', '#fbd38d', '#ea7a2d', '#b42318', '#5c0f0a'],
  dark: ['#1e2731', '#6b4a14', '#c2601c', '#f0604f', '#ffd0c9'],
};
const FONT_SIZE = 11;
const TOP = 4;
const BOTTOM = 22;

export interface Spot {
  layer: string;
  step: number;
}

interface Cell extends Spot {
  value: number | null;
}

interface Place {
  left: number;
  width: number;
  height: number;
}

/** Layers down, steps across. Cells that were not finite stand out in the colour of errors. */
export default function Heatmap(props: {
  heat: Heat;
  log: boolean;
  label: string;
  spot: Spot | null;
  format: (value: number) => string;
  onHover: (cell: Cell | null) => void;
  onPick: (spot: Spot) => void;
}) {
  const { heat, log, spot, format } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const place = useRef<Place>({ left: 0, width: 1, height: 1 });
  const hovered = useRef<Cell | null>(null);
  const [width, setWidth] = useState(0);
  const theme = useShownTheme();
  const ramp = log ? RAMP : SHARES[theme];
  const height = Math.min(1400, Math.max(160, heat.layers.length * 18)) + TOP + BOTTOM;
  const values = useMemo(
    () => new Map(heat.cells.map(([column, row, , value]) => [`${column} ${row}`, value])),
    [heat],
  );

  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    const watcher = new ResizeObserver(() => setWidth(element.clientWidth));
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);

  useEffect(() => {
    if (canvas.current && width > 0) {
      place.current = draw(canvas.current, width, height, heat, ramp, spot);
    }
  }, [heat, ramp, spot, width, height]);

  function cellAt(event: PointerEvent): Cell | null {
    const { left, width: wide, height: high } = place.current;
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - left) / wide) * heat.steps.length);
    const row = Math.floor(((event.clientY - box.top - TOP) / high) * heat.layers.length);
    const [step, layer] = [heat.steps[column], heat.layers[row]];
    if (step === undefined || layer === undefined) return null;
    const value = values.get(`${column} ${row}`);
    if (value === undefined && !heat.notFinite.some(([x, y]) => x === column && y === row))
      return null;
    return { layer, step, value: value ?? null };
  }

  function hover(cell: Cell | null) {
    const before = hovered.current;
    if (before?.layer === cell?.layer && before?.step === cell?.step) return;
    hovered.current = cell;
    props.onHover(cell);
  }

  return (
    <div ref={frame} className="heatmap">
      <canvas
        ref={canvas}
        role="img"
        aria-label={props.label}
        onPointerMove={(event) => hover(cellAt(event))}
        onPointerLeave={() => hover(null)}
        onPointerDown={(event) => {
          const cell = cellAt(event);
          if (cell) props.onPick(cell);
        }}
      />
      <div className="heat-key" aria-hidden="true">
        {format(log ? 2 ** heat.low : heat.low)}
        <span style={{ background: `linear-gradient(to right, ${ramp.join(', ')})` }} />
        {format(log ? 2 ** heat.high : heat.high)}
      </div>
    </div>
  );
}

/** Draws the picture with its axes; answers where its cells are, in pixels of the page. */
function draw(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
  heat: Heat,
  ramp: readonly string[],
  spot: Spot | null,
): Place {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  if (!context) return { left: 0, width: 1, height: 1 };
  const style = getComputedStyle(canvas);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  context.scale(ratio, ratio);
  context.font = `${FONT_SIZE}px ${colour('--font') || 'sans-serif'}`;
  context.fillStyle = colour('--chart-axis');
  context.textBaseline = 'middle';

  const short = (name: string) => (width < 640 && name.length > 16 ? `…${name.slice(-15)}` : name);
  const names = heat.layers.map(short);
  const longest = Math.max(...names.map((name) => context.measureText(name).width));
  const place = {
    left: Math.min(width / 2, Math.ceil(longest) + 8),
    width: 0,
    height: height - TOP - BOTTOM,
  };
  place.width = Math.max(1, width - place.left - 1);
  const cell = { width: place.width / heat.steps.length, height: place.height / names.length };

  context.textAlign = 'right';
  const everyRow = labelEvery(names.length, place.height, FONT_SIZE + 3);
  names.forEach((name, row) => {
    if (row % everyRow === 0)
      context.fillText(name, place.left - 6, TOP + (row + 0.5) * cell.height);
  });
  context.textAlign = 'center';
  const everyColumn = labelEvery(heat.steps.length, place.width, 56);
  heat.steps.forEach((step, column) => {
    // The last one would be cut off by the edge.
    const at = place.left + (column + 0.5) * cell.width;
    if (column % everyColumn === 0 && at < width - 16)
      context.fillText(formatCompact(step), at, height - BOTTOM / 2);
  });

  const small = document.createElement('canvas');
  small.width = heat.steps.length;
  small.height = heat.layers.length;
  const pixels = pixelsOf(heat, ramp.map(bytesOf), bytesOf(colour('--bad')));
  small.getContext('2d')?.putImageData(new ImageData(pixels, small.width), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, place.left, TOP, place.width, place.height);

  const row = spot ? heat.layers.indexOf(spot.layer) : -1;
  const column = spot ? columnOf(heat.steps, spot.step) : -1;
  if (row >= 0 && column >= 0) {
    context.strokeStyle = colour('--bad');
    context.lineWidth = 3;
    const side = 14;
    context.strokeRect(
      place.left + (column + 0.5) * cell.width - side / 2,
      TOP + (row + 0.5) * cell.height - side / 2,
      side,
      side,
    );
  }
  return place;
}
