import { type PointerEvent, useEffect, useRef, useState } from 'react';
import { useShownTheme } from '~/app/theme';
import { formatCompact } from '~/format/numbers';
import type { Heat, Spot } from '~/pages/job/health';
import {
  bytesOf,
  type CellPlace,
  labelEvery,
  moved,
  pixelsOf,
  placeOf,
  shortNames,
} from './heatPicture';

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
// The least side of the mark around what was picked: cells may be smaller than can be seen.
const MARK = 14;

interface Place {
  left: number;
  width: number;
  height: number;
}

/**
 * Layers down, steps across. Cells that were not finite stand out in the colour of errors. The
 * pointer or the arrow keys lead a cursor over the cells, a click or Enter picks one.
 */
export default function Heatmap(props: {
  heat: Heat;
  log: boolean;
  label: string;
  spot: Spot | null;
  format: (value: number) => string;
  onCursor: (cell: CellPlace | null) => void;
  onPick: (spot: Spot) => void;
}) {
  const { heat, log, spot, format } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const mark = useRef<HTMLDivElement>(null);
  const [place, setPlace] = useState<Place>({ left: 0, width: 1, height: 1 });
  const [cursor, setCursor] = useState<CellPlace | null>(null);
  const [width, setWidth] = useState(0);
  const theme = useShownTheme();
  const ramp = log ? RAMP : SHARES[theme];
  const height = Math.min(1400, Math.max(160, heat.layers.length * 18)) + TOP + BOTTOM;

  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    const watcher = new ResizeObserver(() => setWidth(element.clientWidth));
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);

  useEffect(() => {
    if (canvas.current && width > 0) {
      setPlace(draw(canvas.current, width, height, heat, ramp));
    }
  }, [heat, ramp, width, height]);

  // What was picked elsewhere on the page may be out of sight here.
  useEffect(() => {
    if (spot) mark.current?.scrollIntoView({ block: 'nearest' });
  }, [spot]);

  function cellAt(event: PointerEvent): CellPlace | null {
    const box = event.currentTarget.getBoundingClientRect();
    const across = (event.clientX - box.left - place.left) / place.width;
    const down = (event.clientY - box.top - TOP) / place.height;
    if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
    return {
      column: Math.floor(across * heat.steps.length),
      row: Math.floor(down * heat.layers.length),
    };
  }

  function lead(cell: CellPlace | null) {
    if (cursor?.column === cell?.column && cursor?.row === cell?.row) return;
    setCursor(cell);
    props.onCursor(cell);
  }

  function pick(cell: CellPlace | null) {
    const [layer, step] = [heat.layers[cell?.row ?? -1], heat.steps[cell?.column ?? -1]];
    if (layer !== undefined && step !== undefined) props.onPick({ layer, step });
  }

  const boxOf = ({ column, row }: CellPlace, least = 0) => {
    const [wide, high] = [place.width / heat.steps.length, place.height / heat.layers.length];
    const [outerWide, outerHigh] = [Math.max(wide, least), Math.max(high, least)];
    return {
      left: place.left + (column + 0.5) * wide - outerWide / 2,
      top: TOP + (row + 0.5) * high - outerHigh / 2,
      width: outerWide,
      height: outerHigh,
    };
  };
  const picked = spot && placeOf(heat, spot);

  return (
    <div ref={frame} className="heatmap">
      <div
        className="heat-cells"
        tabIndex={0}
        role="group"
        aria-label={props.label}
        onPointerMove={(event) => lead(cellAt(event))}
        onPointerLeave={() => lead(null)}
        onPointerDown={(event) => pick(cellAt(event))}
        onKeyDown={(event) => {
          if (event.key === 'Enter' || event.key === ' ') pick(cursor);
          else {
            const next = moved(heat, cursor ?? picked, event.key);
            if (next === undefined) return;
            lead(next);
          }
          event.preventDefault();
        }}
        onBlur={() => lead(null)}
      >
        <canvas ref={canvas} />
        {cursor && <div className="heat-cursor" style={boxOf(cursor)} />}
        {picked && (
          <div
            ref={mark}
            className="heat-mark"
            style={
              picked.column === null
                ? { ...boxOf({ column: 0, row: picked.row }), left: place.left, width: place.width }
                : boxOf({ column: picked.column, row: picked.row }, MARK)
            }
          />
        )}
      </div>
      <div className="heat-key" aria-hidden="true">
        {heat.beyond.low ? '≤ ' : ''}
        {format(log ? 2 ** heat.low : heat.low)}
        <span style={{ background: `linear-gradient(to right, ${ramp.join(', ')})` }} />
        {heat.beyond.high ? '≥ ' : ''}
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

  const names = width < 640 ? shortNames(heat.layers) : heat.layers;
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
  return place;
}
