/** How far something is; without a total it says so by having no bar. */
export function ProgressBar(props: {
  step: number;
  total: number | null;
  tone?: 'bad' | 'idle';
  label: string;
}) {
  if (!props.total) return null;
  const fraction = Math.min(1, props.step / props.total);
  return (
    <div
      className={`progress ${props.tone ?? ''}`}
      role="progressbar"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={props.total}
      aria-valuenow={props.step}
    >
      <span style={{ width: `${fraction * 100}%` }} />
    </div>
  );
}
