"""Calls of curl in the docs: each is whole, and all name service and key by the same variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_commands import PAGES

SERVICE = ("$OCTRAIN_API_URL", "http://127.0.0.1:8642/")
OPEN = ("/readyz", "/healthz")
"""What needs no key."""


def faults(text: str) -> list[str]:
    """Calls that a reader of the page cannot paste into a shell."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        shorthand = [line for line in block.splitlines() if line.startswith("call ")]
        if shorthand and "api.md" not in text and "call() {" not in text:
            found.append(f"`call` is not told: {shorthand[0]}")
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if "curl -" not in line and 'curl "' not in line:
                continue
            if not any(service in line for service in SERVICE):
                found.append(f"no service: {line}")
            if "Bearer $OCTRAIN_API_KEY" not in line and not any(path in line for path in OPEN):
                found.append(f"no key: {line}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_calls_are_whole(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        'curl "$URL/v1/jobs" -H "Authorization: Bearer $OCTRAIN_API_KEY"',
        'curl -s "$OCTRAIN_API_URL/v1/jobs"',
        "call /jobs",
    ],
)
def test_a_call_that_is_not_whole_is_seen(line: str) -> None:
    assert len(faults(f"```bash\n{line}\n```\n")) == 1
