import createClient, { type Middleware } from 'openapi-fetch';
import type { components, paths } from './generated/schema';
import { ApiError, problemOf } from './problem';
import { heardOf } from './reach';

export type Schemas = components['schemas'];

let csrfToken: string | null = null;
let onSignedOut: () => void = () => {};

/** The token that the session's answer gave; sent with everything that changes something. */
export function setCsrfToken(token: string | null): void {
  csrfToken = token;
}

/** What happens when an answer says that the session has ended. */
export function whenSignedOut(callback: () => void): void {
  onSignedOut = callback;
}

const SAFE = new Set(['GET', 'HEAD', 'OPTIONS']);

const guard: Middleware = {
  onRequest({ request }) {
    if (csrfToken !== null && !SAFE.has(request.method)) {
      request.headers.set('X-Octrain-CSRF', csrfToken);
    }
    return request;
  },
  async onResponse({ request, response }) {
    heardOf(response.status);
    if (response.ok || response.status === 304) return response;
    const body: unknown = await response.json().catch(() => null);
    if (response.status === 401 && !new URL(request.url).pathname.endsWith('/session'))
      onSignedOut();
    throw problemOf(response.status, body);
  },
  onError({ error }) {
    if (error instanceof ApiError) return error;
    if (error instanceof DOMException && error.name === 'AbortError') return error;
    heardOf(0);
    return new ApiError({ status: 0, title: 'The service cannot be reached' });
  },
};

/** The typed client; an answer that is no success is thrown as `ApiError`. */
export const client = createClient<paths>({
  baseUrl: typeof window === 'undefined' ? 'http://localhost' : window.location.origin,
  credentials: 'same-origin',
});
client.use(guard);

/** The body of an answer; for answers that have one. */
export function body<T>(answer: { data?: T; response: Response }): T {
  if (answer.data === undefined) throw problemOf(answer.response.status, null);
  return answer.data;
}

/** A request by path, for what the document's types cannot say (free query members, ETag). */
export async function request(
  path: string,
  init: RequestInit & { json?: unknown } = {},
): Promise<Response> {
  const headers = new Headers(init.headers);
  const method = init.method ?? 'GET';
  if (init.json !== undefined) headers.set('Content-Type', 'application/json');
  if (csrfToken !== null && !SAFE.has(method)) headers.set('X-Octrain-CSRF', csrfToken);
  let response: Response;
  try {
    response = await fetch(path, {
      ...init,
      headers,
      credentials: 'same-origin',
      body: init.json === undefined ? init.body : JSON.stringify(init.json),
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error;
    heardOf(0);
    throw new ApiError({ status: 0, title: 'The service cannot be reached' });
  }
  heardOf(response.status);
  if (response.ok || response.status === 304) return response;
  if (response.status === 401 && !path.endsWith('/session')) onSignedOut();
  throw problemOf(response.status, await response.json().catch(() => null));
}
