/** A line through values in a box, the least at the bottom; broken where one is not finite. */
export function sparklinePath(values: readonly number[], width: number, height: number): string {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return '';
  const low = Math.min(...finite);
  const span = Math.max(...finite) - low || 1;
  const pad = 2;
  let draws = false;
  return values
    .map((value, index) => {
      const goesOn = draws;
      draws = Number.isFinite(value);
      if (!draws) return '';
      const x = pad + (index / (values.length - 1)) * (width - 2 * pad);
      const y = height - pad - ((value - low) / span) * (height - 2 * pad);
      return `${goesOn ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`;
    })
    .join('');
}
