"""A browser for each module of these tests, and a page of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import StartService
from tests.dashboard.browser import PATIENCE, launched, require_browser
from tests.running_service import Service


@pytest.fixture(scope="session")
def played_service(start_service: StartService) -> Service:
    """A stack for nodes that are played, and without a real one: the stack that others share must
    not know of any. It may send webhooks to this machine, and soon gives up on one."""
    return start_service(
        "played",
        {
            "OCTRAIN_WEBHOOK_ALLOW_HTTP": "true",
            "OCTRAIN_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
            "OCTRAIN_WEBHOOK_RETRY_FIRST": "0.2",
            "OCTRAIN_WEBHOOK_GIVE_UP_AFTER": "0.5",
        },
        workers=[],
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = require_browser()
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE)
    with launched(path) as running:
        yield running


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a browser of its own; whatever fails in its scripts, or is refused by the content
    security policy, fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text)
            if message.type == "error" and "Content Security Policy" in message.text
            else None
        ),
    )
    yield page
    context.close()
    assert errors == []
