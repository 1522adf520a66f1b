import { memo, useCallback, useMemo, useState } from 'react';
import type { ColumnDef } from '~/components/Table';
import { TallTable } from '~/components/TallTable';
import { counted, formatPercent } from '~/format/numbers';
import { type Alarm, type Spot, watchedNames, worst } from './health';
import { type Job, useCurves } from './useJob';

interface LayerRow {
  name: string;
  from: string;
  to: string | null;
  group: string | null;
  /** The name that its figures and alarms go by. */
  watched: string;
  reason: string | null;
  saturated: number | null;
  saturatedAt: string;
  underflow: number | null;
  alarms: number;
}

const HEALTH = ['fp8/*/saturated', 'fp8/*/underflow'];

/** Every linear and norm layer: what became of it, why, and its worst figures over all steps. */
export const LayerTable = memo(function LayerTable(props: {
  job: Job;
  rows: readonly { [name: string]: unknown }[];
  alarms: readonly Alarm[];
  spot: Spot | null;
  onPick: (spot: Spot) => void;
}) {
  const [show, setShow] = useState<'all' | 'converted' | 'kept'>('all');
  const [text, setText] = useState('');
  const health = useCurves(props.job.id, HEALTH, null, 3);
  const layers = useMemo(() => {
    const series = health.data?.series ?? [];
    const saturated = worst(series, 'saturated');
    const underflow = worst(series, 'underflow');
    const alarms = new Map<string, number>();
    for (const { layer } of props.alarms) alarms.set(layer, (alarms.get(layer) ?? 0) + 1);
    const seen = new Set([...saturated.keys(), ...underflow.keys(), ...alarms.keys()]);
    const names = watchedNames(props.rows, seen);
    return props.rows.map((row): LayerRow => {
      const name = String(row.name);
      const watched = names.get(name) ?? name;
      const most = saturated.get(watched);
      return {
        name,
        from: String(row.from),
        to: typeof row.to === 'string' ? row.to : null,
        group: typeof row.group === 'string' ? row.group : null,
        watched,
        reason: typeof row.reason === 'string' ? row.reason : null,
        saturated: most?.value ?? null,
        saturatedAt: most ? `${most.tensor}, step ${most.step ?? '?'}` : '',
        underflow: underflow.get(watched)?.value ?? null,
        alarms: alarms.get(watched) ?? 0,
      };
    });
  }, [props.rows, props.alarms, health.data]);
  const converted = layers.filter((layer) => layer.reason === null).length;
  const recipe = recipeOf(props.job.spec);
  const { onPick } = props;

  const columns = useMemo((): ColumnDef<LayerRow>[] => {
    return [
      {
        accessorKey: 'name',
        header: 'Layer',
        cell: ({ row: { original } }) => (
          <button
            type="button"
            className="link mono"
            onClick={() => onPick({ layer: original.watched, step: null })}
          >
            {original.name}
          </button>
        ),
      },
      { accessorKey: 'from', header: 'From' },
      {
        accessorKey: 'to',
        header: 'To',
        cell: ({ row: { original } }) =>
          original.reason !== null ? (
            <span className="muted">kept</span>
          ) : (
            <span className="two-lines" title={original.group ?? undefined}>
              {original.to ?? original.from}
              {original.group && original.group !== original.name && (
                <span className="hint"> in {original.group}</span>
              )}
            </span>
          ),
      },
      {
        id: 'recipe',
        header: 'Recipe',
        accessorFn: (row) => (row.reason === null ? recipe : ''),
        cell: ({ getValue }) => <span className="nowrap">{getValue<string>()}</span>,
      },
      {
        accessorKey: 'reason',
        header: 'Why kept',
        cell: ({ getValue }) => {
          const reason = getValue<string | null>();
          return (
            reason !== null && (
              <span className="two-lines" title={reason}>
                {reason}
              </span>
            )
          );
        },
      },
      {
        accessorKey: 'saturated',
        header: 'Worst saturation',
        sortUndefined: 'last',
        cell: ({ row: { original } }) => (
          <span className={(original.saturated ?? 0) > 0.01 ? 'bad-text' : undefined}>
            {formatPercent(original.saturated)}
            {original.saturated !== null && original.saturated > 0 && (
              <>
                {' '}
                <span className="hint nowrap">{original.saturatedAt}</span>
              </>
            )}
          </span>
        ),
      },
      {
        accessorKey: 'underflow',
        header: 'Worst underflow',
        cell: ({ getValue }) => formatPercent(getValue<number | null>()),
      },
      { accessorKey: 'alarms', header: 'Alarms' },
    ];
  }, [onPick, recipe]);

  const textOf = useCallback(
    (layer: LayerRow, column: string) => textOfLayer(layer, column, recipe),
    [recipe],
  );
  const rows = useMemo(() => {
    const wanted = text.trim().toLowerCase();
    return layers.filter(
      ({ name, reason }) =>
        (show === 'all' || (reason === null) === (show === 'converted')) &&
        name.toLowerCase().includes(wanted),
    );
  }, [layers, show, text]);
  return (
    <>
      <div className="filters">
        <fieldset className="segmented" aria-label="Which layers">
          {(
            [
              ['all', `All ${layers.length}`],
              ['converted', `Converted ${converted}`],
              ['kept', `Kept ${layers.length - converted}`],
            ] as const
          ).map(([value, label]) => (
            <button
              key={value}
              type="button"
              aria-pressed={show === value}
              onClick={() => setShow(value)}
            >
              {label}
            </button>
          ))}
        </fieldset>
        <input
          className="input"
          type="search"
          aria-label="Search by part of a layer's name"
          placeholder="Search by name"
          value={text}
          onChange={(event) => setText(event.target.value)}
        />
        <span className="hint" role="status">
          {text.trim() !== '' &&
            (rows.length === 0 ? 'No such layer' : counted(rows.length, 'layer'))}
        </span>
      </div>
      <TallTable
        label="Layers"
        rows={rows}
        columns={columns}
        textOf={textOf}
        choice={`${show} ${text}`}
        rowId={(row) => row.name}
        rowClass={(row) =>
          props.spot && [row.name, row.watched].includes(props.spot.layer) ? 'chosen' : undefined
        }
      />
    </>
  );
});

function textOfLayer(layer: LayerRow, column: string, recipe: string): string {
  switch (column) {
    case 'to':
      return `${layer.to ?? layer.from}${layer.group === null ? '' : ` in ${layer.group}`}`;
    case 'recipe':
      return layer.reason === null ? recipe : '';
    case 'saturated':
      return `${formatPercent(layer.saturated)} ${layer.saturatedAt}`;
    case 'underflow':
      return formatPercent(layer.underflow);
    default:
      return String(layer[column as keyof LayerRow] ?? '');
  }
}

/** The recipe of converted layers in a few words. */
export function recipeOf(spec: { [name: string]: unknown }): string {
  const recipe = (spec.recipe ?? {}) as Record<string, unknown>;
  return [recipe.engine, recipe.scaling, recipe.fp8_format, recipe.dtype]
    .filter((part) => typeof part === 'string')
    .join(' ');
}
