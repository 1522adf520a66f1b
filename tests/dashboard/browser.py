"""A real browser for the dashboard: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).parents[2]
AXE = REPOSITORY / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
BUILT = REPOSITORY / "dashboard" / "dist" / "index.html"
# Milliseconds: a bound on liveness, no measure.
PATIENCE = 60_000
SIZES = {"wide": (1440, 900), "narrow": (360, 740)}

# The part that reaches furthest beyond the window, to be told where one does for longer than a page
# takes to find its places: data and fonts come, and charts are drawn, one after the other.
_BEYOND = """(patience) => new Promise((done) => {
    const root = document.documentElement;
    const end = performance.now() + patience;
    const look = () => {
        if (root.scrollWidth <= root.clientWidth) return done(null);
        if (performance.now() < end) return requestAnimationFrame(look);
        const parts = [...document.querySelectorAll('body *')]
            .map((part) => [part.getBoundingClientRect().right, part.outerHTML.slice(0, 120)])
            .sort((one, other) => other[0] - one[0]);
        done(`${root.scrollWidth} px of ${root.clientWidth}: ${parts[0]}`);
    };
    look();
})"""

_FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]


def chromium() -> str | None:
    """The path of the system's Chromium."""
    for name in (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    return None


def lacking(reason: str) -> NoReturn:
    """Skip the test; in continuous integration, which installs everything, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def require_browser() -> str:
    """The path of Chromium; see ``lacking`` where the machine has not what a test needs."""
    path = chromium()
    if path is None:
        lacking("no Chromium on this machine: apt-get install chromium, or set CHROMIUM")
    if not BUILT.is_file():
        lacking("the dashboard is not built: make dashboard")
    return path


@contextmanager
def launched(path: str) -> Iterator[Any]:
    """A running Chromium; it ends with the block."""
    from playwright.sync_api import sync_playwright

    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()


def sign_in(page: Any, url: str, key: str, path: str = "/jobs") -> None:
    """Open a page of the dashboard and sign in with the key."""
    page.goto(f"{url}/dashboard{path}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#content").wait_for()


def settled(page: Any) -> None:
    """Wait until the page has its heading, and nothing on it is on its way."""
    from playwright.sync_api import expect

    page.get_by_role("heading", level=1).first.wait_for()
    expect(page.locator(".spinner")).to_have_count(0, timeout=60_000)


def beyond(page: Any) -> str | None:
    """What of the page is wider than its window; None when it fits, as it soon must."""
    found = page.evaluate(_BEYOND, 10_000)
    return str(found) if found is not None else None


def violations(page: Any) -> list[str]:
    """What axe finds that is serious or worse, as text."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        """async () => {
            const { violations } = await axe.run(document, { resultTypes: ['violations'] });
            return violations
                .filter(({ impact }) => impact === 'serious' || impact === 'critical')
                .map(({ id, help, nodes }) => `${id}: ${help}: `
                    + nodes.slice(0, 4).map(({ html }) => html.slice(0, 200)).join(' | '));
        }"""
    )
    return [str(one) for one in found]
