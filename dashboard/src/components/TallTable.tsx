import { type Cell, flexRender, type Row as RowState } from '@tanstack/react-table';
import { defaultRangeExtractor, useVirtualizer } from '@tanstack/react-virtual';
import {
  type FocusEvent,
  Fragment,
  memo,
  type RefObject,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from 'react';
import { HeadRows, type TableProps, useSorted } from './Table';
import { widest } from './widest';

// Of each row, as `.tall` has it: two lines. Places of rows out of view are known without them.
const HEIGHT = 54;

interface Props<Row> extends TableProps<Row> {
  /** What a column shows of the row, as plain text. */
  textOf: (row: Row, column: string) => string;
  /** By what the rows were chosen: with another choice, the first of them come into view. */
  choice: string;
}

/**
 * A table that scrolls within its own place. Of its rows only those in view are elements of the page,
 * and the one that has the focus, which would be lost with it, with those that Tab leads to from there.
 */
export function TallTable<Row>(props: Props<Row>) {
  const table = useSorted(props);
  const { rows } = table.getRowModel();
  const place = useRef<HTMLElement>(null);

  // Columns are as wide as all rows need, so that they stay where they are while rows come and go.
  const { rows: data, textOf } = props;
  const models = useMemo(() => {
    const found = table
      .getAllLeafColumns()
      .map(({ id }) => widest(data.map((row) => textOf(row, id))));
    return [0, 1].map((which) => found.map((rows) => rows[which] ?? 0));
  }, [table, data, textOf]);
  const unsorted = table.getCoreRowModel().rows;
  const order = table.getState().sorting.map(({ id, desc }) => `${id} ${desc}`);
  return (
    <section className="tall" ref={place} aria-label={props.label} tabIndex={0}>
      <table className="table" aria-rowcount={rows.length + 1}>
        <thead>
          <HeadRows table={table} />
          {models.map((indices, which) => (
            // biome-ignore lint/a11y/noAriaHiddenOnFocusable: what is invisible takes no focus
            <tr key={which === 0 ? 'text' : 'word'} className="widest" aria-hidden="true">
              {indices.map((index, column) => {
                const cell = unsorted[index]?.getVisibleCells()[column];
                return (
                  cell && (
                    <td key={cell.column.id}>
                      <div>{shown(cell)}</div>
                    </td>
                  )
                );
              })}
            </tr>
          ))}
        </thead>
        {/* Another one for another choice or order, which is read from its beginning. */}
        <Body
          key={[props.choice, ...order].join('\n')}
          place={place}
          rows={rows}
          rowClass={props.rowClass}
        />
      </table>
    </section>
  );
}

function Body<Row>(props: {
  place: RefObject<HTMLElement | null>;
  rows: readonly RowState<Row>[];
  rowClass: TableProps<Row>['rowClass'];
}) {
  const { place, rows } = props;
  const [focused, setFocused] = useState<string | null>(null);
  const held = focused === null ? -1 : rows.findIndex((row) => row.id === focused);
  useLayoutEffect(() => {
    if (place.current !== null) place.current.scrollTop = 0;
  }, [place]);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => place.current,
    estimateSize: () => HEIGHT,
    overscan: 8,
    getItemKey: (index) => rows[index]?.id ?? index,
    rangeExtractor: (range) => {
      const shown = defaultRangeExtractor(range);
      if (held < 0) return shown;
      const beside = [held - 1, held, held + 1].filter((index) => rows[index] !== undefined);
      return [...new Set([...shown, ...beside])].sort((one, other) => one - other);
    },
  });

  const hold = (event: FocusEvent) =>
    setFocused(event.target.closest('tr')?.getAttribute('data-row') ?? null);
  // On its way to another row, the row that it goes to must stay; and to another window, this one.
  const leave = ({ currentTarget, relatedTarget }: FocusEvent) => {
    if (relatedTarget !== null && !currentTarget.contains(relatedTarget)) setFocused(null);
  };
  const items = virtual.getVirtualItems();
  const gaps = gapsOf(items, virtual.getTotalSize());
  return (
    <tbody onFocus={hold} onBlur={leave}>
      {items.map(({ index, key }, number) => {
        const row = rows[index];
        return (
          row && (
            <Fragment key={key}>
              <Gap height={gaps[number]} />
              <BodyRow
                row={row as RowState<unknown>}
                index={index}
                className={props.rowClass?.(row.original)}
              />
            </Fragment>
          )
        );
      })}
      <Gap height={gaps.at(-1)} />
    </tbody>
  );
}

/** The heights of what is left out before each of these rows, and after the last. */
function gapsOf(items: readonly { start: number; end: number }[], total: number): number[] {
  const ends = [0, ...items.map(({ end }) => end)];
  return [...items.map(({ start }) => start), total].map(
    (start, place) => start - (ends[place] ?? 0),
  );
}

/** Room for rows that are out of view. */
function Gap({ height = 0 }: { height: number | undefined }) {
  if (height <= 0) return null;
  // biome-ignore lint/a11y/noAriaHiddenOnFocusable: nothing in it takes the focus
  return <tr className="gap" aria-hidden="true" style={{ height }} />;
}

function shown<Row>(cell: Cell<Row, unknown>) {
  return flexRender(cell.column.columnDef.cell, cell.getContext());
}

const BodyRow = memo(function BodyRow(props: {
  row: RowState<unknown>;
  index: number;
  className: string | undefined;
}) {
  const { row, index } = props;
  return (
    <tr className={props.className} aria-rowindex={index + 2} data-row={row.id}>
      {row.getVisibleCells().map((cell) => (
        <td key={cell.id}>{shown(cell)}</td>
      ))}
    </tr>
  );
});
