import { type ReactNode, useEffect } from 'react';

/** The head of a page: its title (of the window too), what can be done, and its content. */
export function Page(props: {
  title: string;
  heading?: ReactNode;
  actions?: ReactNode;
  children: ReactNode;
}) {
  useEffect(() => {
    document.title = `${props.title} · Octrain`;
  }, [props.title]);
  return (
    <div className="page">
      <div className="page-head">
        <div className="page-title">{props.heading ?? <h1>{props.title}</h1>}</div>
        {props.actions && <div className="page-actions">{props.actions}</div>}
      </div>
      {props.children}
    </div>
  );
}

/** A part of a page with a heading, which stands below the page's own unless `level` says deeper. */
export function Card(props: {
  title?: ReactNode;
  level?: 2 | 3;
  actions?: ReactNode;
  children: ReactNode;
  className?: string;
}) {
  const Heading = `h${props.level ?? 2}` as const;
  return (
    <section className={`card ${props.className ?? ''}`}>
      {(props.title || props.actions) && (
        <div className="card-head">
          {props.title && <Heading>{props.title}</Heading>}
          {props.actions && <div className="card-actions">{props.actions}</div>}
        </div>
      )}
      {props.children}
    </section>
  );
}

/** A name and its figure. */
export function Tile(props: {
  label: string;
  value: ReactNode;
  note?: ReactNode;
  tone?: 'good' | 'bad';
}) {
  return (
    <div className={`tile ${props.tone ?? ''}`}>
      <span className="tile-label">{props.label}</span>
      <span className="tile-value">{props.value}</span>
      {props.note && <span className="tile-note">{props.note}</span>}
    </div>
  );
}

/** A label with its control below. */
export function Field(props: { label: string; hint?: string; children: ReactNode }) {
  return (
    // biome-ignore lint/a11y/noLabelWithoutControl: the control is the child
    <label className="field">
      <span className="field-label">{props.label}</span>
      {props.children}
      {props.hint && <span className="hint">{props.hint}</span>}
    </label>
  );
}

/** What may be wider than the page, a table above all; it scrolls by keyboard too. */
export function Wide({ label, children }: { label: string; children: ReactNode }) {
  return (
    <section className="table-wrap" aria-label={label} tabIndex={0}>
      {children}
    </section>
  );
}
