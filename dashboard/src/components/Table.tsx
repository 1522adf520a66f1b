import {
  type ColumnDef,
  flexRender,
  getCoreRowModel,
  getSortedRowModel,
  type SortingState,
  type Table as TableState,
  useReactTable,
} from '@tanstack/react-table';
import { useState } from 'react';

export type { ColumnDef } from '@tanstack/react-table';

export interface TableProps<Row> {
  label: string;
  rows: Row[];
  // biome-ignore lint/suspicious/noExplicitAny: each column has a value of its own
  columns: ColumnDef<Row, any>[];
  rowId?: (row: Row) => string;
  initialSort?: SortingState;
  rowClass?: (row: Row) => string | undefined;
}

/** A plain table that sorts what it has. Of many rows there is `TallTable`. */
export function Table<Row>(props: TableProps<Row>) {
  const table = useSorted(props);
  return (
    <section className="table-wrap" aria-label={props.label} tabIndex={0}>
      <table className="table">
        <thead>
          <HeadRows table={table} />
        </thead>
        <tbody>
          {table.getRowModel().rows.map((row) => (
            <tr key={row.id} className={props.rowClass?.(row.original)}>
              {row.getVisibleCells().map((cell) => (
                <td key={cell.id}>{flexRender(cell.column.columnDef.cell, cell.getContext())}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** The rows in the order that their reader has chosen by the heads of the columns. */
export function useSorted<Row>(props: TableProps<Row>): TableState<Row> {
  const [sorting, setSorting] = useState<SortingState>(props.initialSort ?? []);
  return useReactTable({
    data: props.rows,
    columns: props.columns,
    state: { sorting },
    onSortingChange: setSorting,
    getCoreRowModel: getCoreRowModel(),
    getSortedRowModel: getSortedRowModel(),
    ...(props.rowId ? { getRowId: props.rowId } : {}),
  });
}

/** The heads of the columns: buttons where the rows can be sorted by them. */
export function HeadRows<Row>({ table }: { table: TableState<Row> }) {
  return table.getHeaderGroups().map((group) => (
    <tr key={group.id}>
      {group.headers.map((header) => {
        const sorted = header.column.getIsSorted();
        const text = flexRender(header.column.columnDef.header, header.getContext());
        return (
          <th
            key={header.id}
            scope="col"
            aria-sort={
              sorted === 'asc' ? 'ascending' : sorted === 'desc' ? 'descending' : undefined
            }
          >
            {header.column.getCanSort() ? (
              <button
                type="button"
                className="sort"
                onClick={header.column.getToggleSortingHandler()}
              >
                {text}
                <span aria-hidden="true">
                  {sorted === 'asc' ? ' ↑' : sorted === 'desc' ? ' ↓' : ''}
                </span>
              </button>
            ) : (
              text
            )}
          </th>
        );
      })}
    </tr>
  ));
}
