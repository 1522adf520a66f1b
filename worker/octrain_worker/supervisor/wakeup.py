"""What wakes a supervisor's main thread: signals, ended children, its other threads, time.

Everything arrives through one pipe, so nothing is missed between a look and a sleep. Signal
handlers only count; the main loop acts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

__all__ = ["Wakeup"]


class Wakeup:
    """Installed by the main thread. ``terminations`` counts SIGTERM and SIGINT so far."""

    def __init__(self) -> None:
        self.terminations = 0
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        # The default action of SIGCHLD writes nothing into the pipe.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def poke(self) -> None:
        """Wakes the main thread; callable from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def wait(self, seconds: float, *also: int) -> bool:
        """Sleeps until woken or for ``seconds``; whether a descriptor of ``also`` is ready."""
        ready, _, _ = select.select([self._reader, *also], [], [], max(0.0, seconds))
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._reader, 4096):
                    pass
        return any(descriptor in ready for descriptor in also)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self.terminations += 1
