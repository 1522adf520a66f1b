import { useQueryClient } from '@tanstack/react-query';
import { useSyncExternalStore } from 'react';
import { ApiError } from '~/api/problem';

/** Says that what is shown may be old, while the service or the network is away. */
export function OfflineBanner() {
  const queries = useQueryClient();
  const cache = queries.getQueryCache();
  const away = useSyncExternalStore(
    (listener) => {
      window.addEventListener('online', listener);
      window.addEventListener('offline', listener);
      const stop = cache.subscribe(listener);
      return () => {
        window.removeEventListener('online', listener);
        window.removeEventListener('offline', listener);
        stop();
      };
    },
    () =>
      !navigator.onLine ||
      cache.getAll().some(({ state }) => {
        const error = state.error ?? state.fetchFailureReason;
        return error instanceof ApiError && error.offline;
      }),
  );
  if (!away) return null;
  return (
    <div className="banner" role="status">
      <span>
        {navigator.onLine ? 'The service cannot be reached.' : 'This computer is offline.'} What is
        shown may be out of date; training goes on meanwhile.
      </span>
      <button
        type="button"
        className="button small"
        onClick={() => void queries.refetchQueries({ type: 'active' })}
      >
        Try now
      </button>
    </div>
  );
}
