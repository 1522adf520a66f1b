import type { components } from './generated/schema';

type Details = components['schemas']['ProblemDetails'];
export type ProblemError = components['schemas']['ProblemError'];

/** A request that the service refused, or that did not reach it (`status` 0). */
export class ApiError extends Error {
  readonly status: number;
  readonly type: string;
  readonly title: string;
  readonly errors: readonly ProblemError[];
  readonly requestId: string | null;

  constructor(problem: Partial<Details> & { status: number; title: string }) {
    super(problem.detail || problem.title);
    this.name = 'ApiError';
    this.status = problem.status;
    this.type = problem.type ?? '';
    this.title = problem.title;
    this.errors = problem.errors ?? [];
    this.requestId = problem.request_id ?? null;
  }

  /** Whether the request never reached the service. */
  get offline(): boolean {
    return this.status === 0;
  }
}

/** The error of an answer that is no success; tolerates bodies that are no problem document. */
export function problemOf(status: number, body: unknown): ApiError {
  if (typeof body === 'object' && body !== null && 'title' in body) {
    return new ApiError({ ...(body as Details), status });
  }
  return new ApiError({ status, title: `The service answered ${status}` });
}

/** What a person can do about an error, in one sentence. */
export function advice(error: unknown): string {
  if (!(error instanceof ApiError))
    return 'Reload the page; if it happens again, tell an operator.';
  if (error.offline)
    return 'Check the network and that the service is running; it is tried again by itself.';
  if (error.status === 401) return 'Sign in again with a key that is valid.';
  if (error.status === 403)
    return 'Sign in with a key that has the scope for this, or ask an administrator.';
  if (error.status === 404) return 'It may have been deleted, or belong to another owner.';
  if (error.status === 409)
    return 'Something changed meanwhile: look at the present state and try again.';
  if (error.status === 422) return 'Correct what is named and send it again.';
  if (error.status === 429) return 'Wait a moment: too many requests were sent.';
  if (error.status >= 500) {
    const id = error.requestId ? ` The server's log has it as ${error.requestId}.` : '';
    return `Try again in a moment.${id}`;
  }
  return 'Try again.';
}
