"""Time enough for sinks on a busy machine."""

from __future__ import annotations

import pytest

from fp8core.telemetry.sinks import launch


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink takes seconds to start where others work too; tests of a short wait say so."""
    for outcome in launch._PATIENCE_SECONDS:
        monkeypatch.setitem(launch._PATIENCE_SECONDS, outcome, 60.0)
