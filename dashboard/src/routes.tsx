import {
  createRootRoute,
  createRoute,
  createRouter,
  lazyRouteComponent,
  Outlet,
  redirect,
} from '@tanstack/react-router';
import { Shell } from './app/Shell';
import { parseSearch, type Search, stringifySearch } from './app/search';
import { NotFound, RouteError } from './components/states';

/** One line a page: its path, then the module that is loaded when it is first visited. */
const root = createRootRoute({ component: Outlet, notFoundComponent: NotFound });
const shell = createRoute({ getParentRoute: () => root, id: 'shell', component: Shell });
const validateSearch = (search: Record<string, unknown>): Search => search as Search;
const under = { getParentRoute: () => shell, validateSearch } as const;

// biome-ignore format: a table
const pages = shell.addChildren([
  createRoute({ ...under, path: '/', beforeLoad: () => { throw redirect({ to: '/jobs' }); } }),
  createRoute({ ...under, path: '/jobs', component: lazyRouteComponent(() => import('./pages/jobs/JobsPage')) }),
  createRoute({ ...under, path: '/jobs/new', component: lazyRouteComponent(() => import('./pages/new-job/NewJobPage')) }),
  createRoute({ ...under, path: '/jobs/$jobId', component: lazyRouteComponent(() => import('./pages/job/JobPage')) }),
  createRoute({ ...under, path: '/compare', component: lazyRouteComponent(() => import('./pages/compare/ComparePage')) }),
  createRoute({ ...under, path: '/nodes', component: lazyRouteComponent(() => import('./pages/nodes/NodesPage')) }),
  createRoute({ ...under, path: '/keys', component: lazyRouteComponent(() => import('./pages/keys/KeysPage')) }),
  createRoute({ ...under, path: '/webhooks', component: lazyRouteComponent(() => import('./pages/webhooks/WebhooksPage')) }),
  createRoute({ ...under, path: '/usage', component: lazyRouteComponent(() => import('./pages/usage/UsagePage')) }),
]);

export const router = createRouter({
  routeTree: root.addChildren([pages]),
  basepath: '/dashboard',
  parseSearch,
  stringifySearch,
  defaultPreload: 'intent',
  defaultErrorComponent: RouteError,
  scrollRestoration: false,
});

declare module '@tanstack/react-router' {
  interface Register {
    router: typeof router;
  }
}
