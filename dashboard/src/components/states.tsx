import { Link } from '@tanstack/react-router';
import type { ReactNode } from 'react';
import { ApiError, advice } from '~/api/problem';

/** Something is on its way. */
export function Loading({ label = 'Loading' }: { label?: string }) {
  return (
    <div className="state" role="status">
      <span className="spinner" aria-hidden="true" />
      <span className="muted">{label}…</span>
    </div>
  );
}

/** There is nothing to show; says what to do about it. */
export function EmptyState(props: { title: string; children?: ReactNode; action?: ReactNode }) {
  return (
    <div className="state">
      <p className="state-title">{props.title}</p>
      {props.children && <div className="muted state-text">{props.children}</div>}
      {props.action}
    </div>
  );
}

/** Something failed: what, why, and what can be done. */
export function ErrorState({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const title = error instanceof ApiError ? error.title : 'This part of the page failed';
  const message = error instanceof Error ? error.message : String(error);
  return (
    <div className="state error" role="alert">
      <p className="state-title">{title}</p>
      {message !== title && !(error instanceof ApiError && error.errors.length > 0) && (
        <p className="state-text">{message}</p>
      )}
      {error instanceof ApiError && error.errors.length > 0 && (
        <ul className="problem-list">
          {error.errors.map((problem) => (
            <li key={`${problem.pointer}${problem.message}`}>
              <code>{problem.pointer || '/'}</code> {problem.message}
              {problem.suggestion ? ` Did you mean “${problem.suggestion}”?` : ''}
            </li>
          ))}
        </ul>
      )}
      <p className="muted state-text">{advice(error)}</p>
      {onRetry && (
        <button type="button" className="button" onClick={onRetry}>
          Try again
        </button>
      )}
    </div>
  );
}

export function RouteError({ error, reset }: { error: unknown; reset: () => void }) {
  return <ErrorState error={error} onRetry={reset} />;
}

export function NotFound() {
  return (
    <main className="lonely">
      <EmptyState
        title="There is no such page"
        action={
          <Link to="/jobs" className="button">
            Show the jobs
          </Link>
        }
      >
        The address may be mistyped, or of a newer version of the service.
      </EmptyState>
    </main>
  );
}
