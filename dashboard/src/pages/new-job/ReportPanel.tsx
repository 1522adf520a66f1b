import { Card } from '~/components/Page';
import { ErrorState } from '~/components/states';
import { Words } from '~/components/Words';
import { formatBytes, formatCompact, formatNumber } from '~/format/numbers';
import { formatDuration } from '~/format/times';
import { isObject, type Json } from './schema';
import type { Report } from './useValidation';

/** What is known of the job before it is submitted. */
export function ReportPanel(props: {
  report: Report | undefined;
  error: unknown;
  isCurrent: boolean;
  onRetry: () => void;
}) {
  const { report } = props;
  if (report === undefined && props.error)
    return <ErrorState error={props.error} onRetry={props.onRetry} />;
  return (
    <Card title="Before it is submitted" className="report-panel">
      <p className={`verdict ${report?.valid ? 'good' : 'bad'}`} role="status">
        {report === undefined
          ? 'Asking the service…'
          : report.valid
            ? 'The service would take this job.'
            : `${report.errors.length === 1 ? 'One thing is' : `${report.errors.length} things are`} not right yet.`}
        {report !== undefined && !props.isCurrent && <span className="muted"> Asking again…</span>}
      </p>
      {report && (
        <>
          <Problems report={report} />
          <Nodes report={report} />
          <Plan report={report} />
        </>
      )}
    </Card>
  );
}

function Problems({ report }: { report: Report }) {
  return (
    <>
      {report.errors.length > 0 && (
        <ul className="problem-list">
          {report.errors.map((error) => (
            <li key={`${error.pointer}${error.message}`} className="form-error">
              <code>{error.pointer || '/'}</code> <Words text={error.message} />
            </li>
          ))}
        </ul>
      )}
      {report.warnings.length > 0 && (
        <>
          <h3>Warnings</h3>
          <ul className="problem-list">
            {report.warnings.map((warning) => (
              <li key={`${warning.pointer}${warning.code}`}>
                {warning.pointer && <code>{warning.pointer}</code>} <Words text={warning.message} />
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}

function Nodes({ report }: { report: Report }) {
  if (!report.valid) return null;
  const fitting = report.nodes.filter((node) => node.fits && node.is_live);
  return (
    <>
      <h3>Nodes</h3>
      {report.nodes.length === 0 && (
        <p className="muted">No node is registered: the job would wait for one.</p>
      )}
      <ul className="plain-list">
        {report.nodes.map((node) => (
          <li key={node.node}>
            <strong>{node.node}</strong>{' '}
            {!node.fits
              ? `cannot run it: ${node.reason ?? 'it does not say why'}`
              : !node.is_live
                ? 'fits, but is not heard of at present'
                : node.free
                  ? 'fits and is free: it would start at once'
                  : 'fits, but is full at this moment'}
          </li>
        ))}
      </ul>
      {report.nodes.length > 0 && fitting.length === 0 && (
        <p className="muted">
          No live node can run it now; submitted with “wait for a node” it would queue.
        </p>
      )}
    </>
  );
}

function Plan({ report }: { report: Report }) {
  if (!report.valid) return null;
  const time = report.time;
  const rows: [string, string][] = [];
  if (time) {
    rows.push(['Time', `about ${formatDuration(time.seconds)} on ${time.device}`]);
    rows.push([
      'Speed',
      `${formatCompact(time.tokens_per_second)} tokens/s, as ${time.from_jobs.length} like job(s) had`,
    ]);
  }
  const plan = report.plan;
  if (plan) rows.push(...planRows(plan as { [name: string]: Json }));
  return (
    <>
      <h3>Plan</h3>
      {report.plan_status === 'pending' && <p className="muted">A node is working it out…</p>}
      {(report.plan_status === 'unavailable' || report.plan_status === 'failed') && (
        <p className="muted">{report.plan_detail ?? 'No live node is there to be asked.'}</p>
      )}
      {rows.length > 0 && (
        <dl className="plan-facts">
          {rows.map(([name, value]) => (
            <div key={name + value}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      )}
    </>
  );
}

/** What a node found by building the model without weights; see the training library's `Plan`. */
function planRows(plan: { [name: string]: Json }): [string, string][] {
  const rows: [string, string][] = [];
  const { parameters, memory, conversion, fusion } = plan;
  if (isObject(parameters)) {
    const { total, trainable } = parameters;
    const some = typeof trainable === 'number' && trainable !== total;
    rows.push([
      'Parameters',
      `${formatCompact(wire(total))}${some ? `, ${formatCompact(wire(trainable))} of them trained` : ''}`,
    ]);
  }
  if (isObject(conversion)) {
    rows.push([
      'Layers',
      `${formatNumber(wire(conversion.converted))} of ${formatNumber(wire(conversion.layers))} converted`,
    ]);
    const because = isObject(conversion.kept_because)
      ? Object.entries(conversion.kept_because)
      : [];
    for (const [reason, count] of because)
      rows.push(['Kept', `${formatNumber(wire(count))}: ${reason}`]);
  }
  if (isObject(fusion) && typeof fusion.blocks === 'number' && fusion.blocks > 0)
    rows.push([
      'Blocks',
      `${formatNumber(wire(fusion.fused))} of ${formatNumber(fusion.blocks)} fused`,
    ]);
  if (isObject(memory)) rows.push(['Memory of one device', formatBytes(wire(memory.total))]);
  if (typeof plan.tokens_per_step === 'number')
    rows.push(['Tokens a step', formatNumber(plan.tokens_per_step)]);
  return rows;
}

function wire(value: Json | undefined): number | string | null {
  return typeof value === 'number' || typeof value === 'string' ? value : null;
}
