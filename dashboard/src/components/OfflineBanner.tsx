import { useQueryClient } from '@tanstack/react-query';
import { useEffect, useSyncExternalStore } from 'react';
import { request } from '~/api/client';
import { type Reach, useReach } from '~/api/reach';

// While the service is away, it is asked so often whether it is there again.
const ASK_MS = 3000;

const SAID: Record<Exclude<Reach, 'answers'>, string> = {
  away: 'The service cannot be reached.',
  failing: 'The service cannot answer at present.',
};

function watchNetwork(listener: () => void): () => void {
  window.addEventListener('online', listener);
  window.addEventListener('offline', listener);
  return () => {
    window.removeEventListener('online', listener);
    window.removeEventListener('offline', listener);
  };
}

/**
 * Says that what is shown may be old, while the service or the network is away. Meanwhile it asks
 * for the service, and once that is there again everything on the page is read anew.
 */
export function OfflineBanner() {
  const queries = useQueryClient();
  const reach = useReach();
  const online = useSyncExternalStore(watchNetwork, () => navigator.onLine);
  const away = reach !== 'answers';
  useEffect(() => {
    if (!away) return;
    // The answer itself is of no interest: each one is told to `useReach`.
    const ask = () => void request('/v1/session').catch(() => {});
    const timer = setInterval(ask, ASK_MS);
    window.addEventListener('online', ask);
    return () => {
      clearInterval(timer);
      window.removeEventListener('online', ask);
      void queries.invalidateQueries();
    };
  }, [away, queries]);
  if (!away && online) return null;
  return (
    <div className="banner" role="status">
      <span>
        {online ? SAID[reach === 'answers' ? 'away' : reach] : 'This computer is offline.'} What is
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
