"""A stop by signal: once politely, twice at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest", "StopRequested"]


class StopRequested(BaseException):
    """Raised by a signal where nothing would be lost by leaving at once.

    Like ``KeyboardInterrupt`` no ``Exception``, so that no handler of ordinary errors keeps it.
    """


class StopRequest:
    """Whether SIGTERM or SIGINT asked this process to stop.

    The first only sets ``requested``, for the loop to finish its step and save; inside
    ``interruptible()`` it raises ``StopRequested`` there and then. The second ends the process,
    unless ``patient``: one of several ranks may be told by several sides, and is killed by the
    launcher when there is no time to save.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.requested = False
        self._patient = patient
        self._interruptible = False

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT. Call it in the main thread."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def request(self) -> None:
        self.requested = True

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Code that may be left at any point: nothing in it needs saving."""
        if self.requested:
            raise StopRequested
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if self._patient:
                return
            os._exit(128 + number)
        self.requested = True
        if self._interruptible:
            raise StopRequested
