import { useSyncExternalStore } from 'react';

export type ThemeChoice = 'system' | 'light' | 'dark';

const NAME = 'octrain.theme';
const listeners = new Set<() => void>();
const dark = () => window.matchMedia('(prefers-color-scheme: dark)');

function stored(): ThemeChoice {
  try {
    const value = localStorage.getItem(NAME);
    return value === 'light' || value === 'dark' ? value : 'system';
  } catch {
    return 'system';
  }
}

let choice: ThemeChoice = 'system';

function tell(): void {
  document.documentElement.dataset.theme = shownTheme();
  for (const listener of listeners) listener();
}

function shownTheme(): 'light' | 'dark' {
  if (choice !== 'system') return choice;
  return dark().matches ? 'dark' : 'light';
}

/** Applies the stored choice and follows the system's; once, before the first paint. */
export function startTheme(): void {
  choice = stored();
  dark().addEventListener('change', tell);
  tell();
}

export function setTheme(next: ThemeChoice): void {
  choice = next;
  try {
    if (next === 'system') localStorage.removeItem(NAME);
    else localStorage.setItem(NAME, next);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
  tell();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** What is shown now: charts draw their colours anew when it changes. */
export function useShownTheme(): 'light' | 'dark' {
  return useSyncExternalStore(subscribe, shownTheme);
}

export function useThemeChoice(): ThemeChoice {
  return useSyncExternalStore(subscribe, () => choice);
}
