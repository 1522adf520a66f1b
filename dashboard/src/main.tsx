import { QueryCache, QueryClient, QueryClientProvider } from '@tanstack/react-query';
import { RouterProvider } from '@tanstack/react-router';
import { StrictMode } from 'react';
import { createRoot } from 'react-dom/client';
import { whenSignedOut } from './api/client';
import { ApiError } from './api/problem';
import { keepFocus } from './app/keepFocus';
import { sessionQuery } from './app/session';
import { startTheme } from './app/theme';
import { ToastArea } from './components/Toast';
import { router } from './routes';
import './styles/tokens.css';
import './styles/base.css';
import './styles/components.css';
import './styles/pages.css';

startTheme();

// A part of this page is gone: the service was updated meanwhile. Once, so that nothing goes round.
window.addEventListener('vite:preloadError', () => {
  const before = Number(sessionStorage.getItem('octrain.reloaded') ?? 0);
  if (Date.now() - before < 60_000) return;
  sessionStorage.setItem('octrain.reloaded', String(Date.now()));
  window.location.reload();
});

const queries = new QueryClient({
  queryCache: new QueryCache(),
  defaultOptions: {
    queries: {
      staleTime: 5_000,
      refetchOnWindowFocus: true,
      // The service being away is waited out; what it refused stays refused.
      retry: (count, error) =>
        count < 3 && (!(error instanceof ApiError) || error.offline || error.status >= 500),
      networkMode: 'always',
    },
    mutations: { networkMode: 'always' },
  },
});
whenSignedOut(() => queries.setQueryData(sessionQuery.queryKey, null));

const place = document.getElementById('root');
if (place === null) throw new Error('index.html has no element #root');
keepFocus(place);
createRoot(place).render(
  <StrictMode>
    <QueryClientProvider client={queries}>
      <RouterProvider router={router} />
      <ToastArea />
    </QueryClientProvider>
  </StrictMode>,
);
