import { Link, Outlet, useRouterState } from '@tanstack/react-router';
import { useEffect, useState } from 'react';
import { OfflineBanner } from '~/components/OfflineBanner';
import { ErrorState, Loading } from '~/components/states';
import SignInPage from '~/pages/sign-in/SignInPage';
import { navigation } from './navigation';
import { useSession, useSignOut } from './session';
import { setTheme, type ThemeChoice, useThemeChoice } from './theme';

/** The frame of every page; without a session it asks for a key. */
export function Shell() {
  const session = useSession();
  if (session.isPending) return <Loading label="Asking who is signed in" />;
  if (session.isError && session.data === undefined) {
    return (
      <main className="lonely">
        <ErrorState error={session.error} onRetry={() => void session.refetch()} />
      </main>
    );
  }
  if (!session.data) return <SignInPage />;
  return <Frame owner={session.data.owner} />;
}

function Frame({ owner }: { owner: string }) {
  const [open, setOpen] = useState(false);
  const path = useRouterState({ select: (state) => state.location.pathname });
  // biome-ignore lint/correctness/useExhaustiveDependencies: a new page closes the menu
  useEffect(() => setOpen(false), [path]);
  return (
    <div className="frame">
      <a className="skip-link" href="#content">
        Skip to the content
      </a>
      <header className="topbar">
        <Link to="/jobs" className="brand">
          <img src={`${import.meta.env.BASE_URL}octrain.svg`} alt="" width="24" height="24" />
          Octrain
        </Link>
        <button
          type="button"
          className="button quiet menu-button"
          aria-expanded={open}
          aria-controls="navigation"
          onClick={() => setOpen(!open)}
        >
          Menu
        </button>
        <nav id="navigation" aria-label="Pages" className={open ? 'nav open' : 'nav'}>
          {navigation.map(({ to, label }) => (
            <Link
              key={to}
              to={to}
              className="nav-link"
              // A job's page is one of the jobs; the form of a new one is a page of its own.
              activeOptions={{ exact: path.endsWith('/jobs/new') }}
              activeProps={{ 'aria-current': 'page' }}
            >
              {label}
            </Link>
          ))}
          <span className="nav-space" />
          <ThemeSwitch />
          <SignedIn owner={owner} />
        </nav>
      </header>
      <OfflineBanner />
      <main id="content" className="content" tabIndex={-1}>
        <Outlet />
      </main>
    </div>
  );
}

const CHOICES: [ThemeChoice, string][] = [
  ['system', 'As the system'],
  ['light', 'Light'],
  ['dark', 'Dark'],
];

function ThemeSwitch() {
  const choice = useThemeChoice();
  return (
    <select
      className="select small"
      aria-label="Colours"
      value={choice}
      onChange={(event) => setTheme(event.target.value as ThemeChoice)}
    >
      {CHOICES.map(([value, label]) => (
        <option key={value} value={value}>
          {label}
        </option>
      ))}
    </select>
  );
}

function SignedIn({ owner }: { owner: string }) {
  const signOut = useSignOut();
  return (
    <span className="signed-in">
      <span className="owner" title="The owner of the key that signed in">
        {owner}
      </span>
      <button type="button" className="button quiet small" onClick={() => void signOut()}>
        Sign out
      </button>
    </span>
  );
}
