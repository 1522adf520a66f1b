/** The points of a polyline in a box: finite values only, the least at the bottom. */
export function sparklinePath(values: readonly number[], width: number, height: number): string {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return '';
  const low = Math.min(...finite);
  const span = Math.max(...finite) - low || 1;
  const pad = 2;
  return finite
    .map((value, index) => {
      const x = pad + (index / (finite.length - 1)) * (width - 2 * pad);
      const y = height - pad - ((value - low) / span) * (height - 2 * pad);
      return `${index === 0 ? 'M' : 'L'}${x.toFixed(1)} ${y.toFixed(1)}`;
    })
    .join('');
}
