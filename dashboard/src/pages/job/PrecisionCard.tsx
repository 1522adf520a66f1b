import { ApiError } from '~/api/problem';
import { Card, Wide } from '~/components/Page';
import { ErrorState, Loading } from '~/components/states';
import { formatBytes } from '~/format/numbers';
import { type Job, usePrecision } from './useJob';

interface Counted {
  formats?: Record<string, { bytes: number; elements: number }>;
  bytes?: number;
  ranks?: number;
}

interface AttentionPass {
  pass: string;
  format: string;
  calls: number;
}

interface LayerKind {
  kind: string;
  converted: boolean;
  adapter: boolean;
  layers: number;
  example: string;
  gemms: {
    gemm: string;
    operands: Record<string, { format: string; bytes_per_element: number | null }>;
  }[];
}

const ROWS: [name: string, label: string][] = [
  ['communication', 'Communication of gradients'],
  ['weights', 'Weights'],
  ['master_weights', 'Master weights'],
  ['weight_gradients', 'Weight gradients'],
  ['optimizer_states', 'Optimizer states'],
];

/** The formats of GEMMs and of everything stored, as the running job was measured. */
export function PrecisionCard({ job }: { job: Job }) {
  const table = usePrecision(job);
  const title = 'Formats, measured on the running job';
  if (table.isPending) {
    return (
      <Card title={title}>
        <Loading label="Reading the precision table" />
      </Card>
    );
  }
  if (table.isError) {
    const absent = table.error instanceof ApiError && table.error.status === 404;
    return (
      <Card title={title}>
        {absent ? (
          <p className="muted">
            {job.is_final
              ? 'The job ended before its first step was measured.'
              : 'It is measured on the first step of an attempt.'}
          </p>
        ) : (
          <ErrorState error={table.error} onRetry={() => void table.refetch()} />
        )}
      </Card>
    );
  }
  const rows = table.data.rows as Record<
    string,
    Counted & { layers?: LayerKind[]; passes?: AttentionPass[] }
  >;
  const kinds = rows.gemm_compute?.layers ?? [];
  const passes = rows.attention_compute?.passes ?? [];
  return (
    <Card
      title={title}
      actions={
        <span className="hint">
          Step {table.data.step} of attempt {table.data.attempt}
        </span>
      }
    >
      <Wide label="Formats and bytes">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">What</th>
              <th scope="col">Layers</th>
              <th scope="col">Formats</th>
              <th scope="col" className="number">
                Bytes
              </th>
            </tr>
          </thead>
          <tbody>
            {kinds.map((kind) => (
              <tr key={`${kind.kind}${kind.example}`}>
                <td>
                  GEMMs of {kind.kind}
                  <span className="hint">
                    {' '}
                    {kind.converted ? 'converted' : 'kept'}
                    {kind.adapter ? ', adapter' : ''}
                  </span>
                </td>
                <td>
                  {kind.layers} <span className="hint">such as {kind.example}</span>
                </td>
                <td>
                  <span className="chips">
                    {kind.gemms.map(({ gemm, operands }) => (
                      <span key={`${gemm}${JSON.stringify(operands)}`} className="chip wide">
                        {gemm}:{' '}
                        {Object.entries(operands)
                          .map(([operand, { format }]) => `${operand} ${format}`)
                          .join(' × ')}
                      </span>
                    ))}
                  </span>
                </td>
                <td className="number">–</td>
              </tr>
            ))}
            {passes.length > 0 && (
              <tr>
                <td>Attention</td>
                <td />
                <td>
                  <span className="chips">
                    {passes.map(({ pass, format, calls }) => (
                      <span key={`${pass}${format}`} className="chip wide">
                        {pass}: {format} <span className="hint">{calls} calls</span>
                      </span>
                    ))}
                  </span>
                </td>
                <td className="number">–</td>
              </tr>
            )}
            {ROWS.map(([name, label]) => {
              const row = rows[name];
              if (!row) return null;
              const formats = Object.entries(row.formats ?? {});
              return (
                <tr key={name}>
                  <td>{label}</td>
                  <td>
                    {name === 'communication'
                      ? `${row.ranks ?? 1} ${row.ranks === 1 ? 'rank' : 'ranks'}`
                      : ''}
                  </td>
                  <td>
                    {formats.length === 0 ? (
                      <span className="muted">none</span>
                    ) : (
                      <span className="chips">
                        {formats.map(([format, { bytes }]) => (
                          <span key={format} className="chip wide">
                            {format}: {formatBytes(bytes)}
                          </span>
                        ))}
                      </span>
                    )}
                  </td>
                  <td className="number">{formatBytes(row.bytes)}</td>
                </tr>
              );
            })}
            <EngineState state={table.data.engine_state as Counted} engine={table.data.engine} />
          </tbody>
        </table>
      </Wide>
    </Card>
  );
}

function EngineState({ state, engine }: { state: Counted; engine: string }) {
  if (!state.bytes) return null;
  return (
    <tr>
      <td>Histories and scales of the engine {engine}</td>
      <td />
      <td>
        <span className="chips">
          {Object.entries(state.formats ?? {}).map(([format, { bytes }]) => (
            <span key={format} className="chip wide">
              {format}: {formatBytes(bytes)}
            </span>
          ))}
        </span>
      </td>
      <td className="number">{formatBytes(state.bytes)}</td>
    </tr>
  );
}
