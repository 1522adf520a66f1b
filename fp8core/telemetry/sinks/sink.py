"""What a sink is to the process that feeds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Sink", "SinkRefused"]


class SinkRefused(Exception):
    """The other side said no, and will say it again: there is nothing to wait for."""


class Sink(Protocol):
    """Where records go. ``write`` may be given records a second time after it has failed."""

    def write(self, records: Sequence[dict[str, Any]]) -> None: ...

    def state(self) -> dict[str, Any]:
        """What a later process of the same workdir needs to go on."""
        ...

    def close(self, outcome: str) -> None:
        """``outcome``: succeeded, stopped, failed, or lost where the trainer did not say."""
        ...
