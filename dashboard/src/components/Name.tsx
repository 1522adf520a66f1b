/**
 * A name that people gave: in its own direction, so that it does not carry along what stands beside
 * it, and cut short where there is no room, with the whole of it on hovering.
 */
export function Name({ children, lines = 1 }: { children: string; lines?: 1 | 3 }) {
  return (
    <bdi className={lines === 1 ? 'name' : 'name tall-name'} title={children}>
      {children}
    </bdi>
  );
}

/** A label of a job, each part of it in its own direction. */
export function LabelText({ name, value }: { name: string; value: string }) {
  return (
    <span className="label-text">
      <bdi>{name}</bdi>=<bdi>{value}</bdi>
    </span>
  );
}
