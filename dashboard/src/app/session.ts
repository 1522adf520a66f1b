import { type QueryClient, queryOptions, useQuery, useQueryClient } from '@tanstack/react-query';
import { request, type Schemas, setCsrfToken } from '~/api/client';
import { ApiError } from '~/api/problem';

/** Who is signed in. The key itself is given once, for a cookie that is out of reach of scripts. */
export type Session = Schemas['SessionObject'];

const PATH = '/v1/session';

async function readSession(): Promise<Session | null> {
  try {
    const session = (await (await request(PATH)).json()) as Session;
    setCsrfToken(session.csrf_token);
    return session;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      setCsrfToken(null);
      return null;
    }
    throw error;
  }
}

export const sessionQuery = queryOptions({
  queryKey: ['session'],
  queryFn: readSession,
  staleTime: 60_000,
  retry: 2,
});

/** The session; throws nothing: `data` is null when nobody is signed in. */
export function useSession() {
  return useQuery(sessionQuery);
}

/** What one key may see is nothing for the next. The session's own query has its watchers. */
function forgetOthers(queries: QueryClient): void {
  queries.removeQueries({ predicate: ({ queryKey }) => queryKey[0] !== sessionQuery.queryKey[0] });
}

export function useSignIn(): (key: string) => Promise<void> {
  const queries = useQueryClient();
  return async (key) => {
    const answer = await request(PATH, {
      method: 'POST',
      json: { key } satisfies Schemas['SessionRequest'],
    });
    const session = (await answer.json()) as Session;
    setCsrfToken(session.csrf_token);
    forgetOthers(queries);
    queries.setQueryData(sessionQuery.queryKey, session);
  };
}

export function useSignOut(): () => Promise<void> {
  const queries = useQueryClient();
  return async () => {
    await request(PATH, { method: 'DELETE' });
    setCsrfToken(null);
    forgetOthers(queries);
    queries.setQueryData(sessionQuery.queryKey, null);
  };
}

/** Whether the key that signed in may do what needs this scope. */
export function useScope(scope: 'jobs:read' | 'jobs:write' | 'admin'): boolean {
  const { data } = useSession();
  if (!data) return false;
  return data.scopes.includes(scope) || data.scopes.includes('admin');
}
