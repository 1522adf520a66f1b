/**
 * Keeps the keyboard's place: what has the focus may be replaced, or be disabled while a request is
 * on its way. The browser then begins at the top of the page again, far from where one was.
 */

const FOCUSABLE = 'a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled)';
// Parts that scroll by keyboard: what is in them comes and goes.
const REGIONS = 'section[tabindex], [role="table"][tabindex]';

/** Watches over all within `root`; once, for as long as the page lives. */
export function keepFocus(root: HTMLElement): void {
  let last: HTMLElement | null = null;
  let around: HTMLElement[] = [];

  document.addEventListener('focusin', ({ target }) => {
    last = target instanceof HTMLElement && root.contains(target) ? target : null;
    around = [];
    for (let part = last?.parentElement; part && part !== root; part = part.parentElement)
      around.push(part);
  });
  // What is there and could have the focus was left on purpose, by a press elsewhere.
  document.addEventListener('focusout', ({ target, relatedTarget }) => {
    if (relatedTarget !== null) return;
    setTimeout(() => {
      if (target === last && isLost() && document.hasFocus() && last && canHave(last)) last = null;
    });
  });
  const watcher = new MutationObserver(() => {
    if (last === null || !isLost()) return;
    // One that is disabled is waited for.
    if (last.isConnected) {
      if (canHave(last)) last.focus({ preventScroll: true });
      return;
    }
    placeFor(around)?.focus({ preventScroll: true });
  });
  watcher.observe(root, { subtree: true, childList: true, attributeFilter: ['disabled'] });
}

const isLost = () => document.activeElement === null || document.activeElement === document.body;
const canHave = (part: HTMLElement) => part.isConnected && !part.matches(':disabled');

/** What is nearest to something that is gone, by what it stood in; else the content of the page. */
function placeFor(around: readonly HTMLElement[]): HTMLElement | null {
  const left = around.filter((part) => part.isConnected);
  const region = left.find((part) => part.matches(REGIONS));
  if (region) return region;
  for (const part of left) {
    if (part.id === 'content') break;
    const near = part.querySelector<HTMLElement>(FOCUSABLE);
    if (near) return near;
  }
  return document.getElementById('content');
}
