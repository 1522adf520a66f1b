"""Batches made ahead, by a thread, so that a step only takes one and copies it.

Most batches cost next to nothing, but every few of them a stretch of documents has to be read and
encoded at once. Done beside training, that is hidden behind the steps before. Where the data stands
is told by the batches that were taken, not by those that were made: each comes with its place.

A document of tens of megabytes is encoded for as many seconds, in one call that nothing ends. Who
waits for its batch meanwhile can be called away: the wait is in another thread than the work.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from fp8core.data.batch import Batch
from fp8core.data.batches import Statistics, TrainingBatches

__all__ = ["AheadBatches", "PrefetchedBatches", "WaitInterrupted", "is_still_reading"]

# A window of chats is encoded at once, and is a few dozen rows: about so many batches hide it.
_MOST = 16
_MOST_BYTES = 64 * 1024 * 1024
# What a step takes at once it would wait for, but of very many batches it does.
_MOST_BYTES_AT_ONCE = 512 * 1024 * 1024
# How soon a wait is seen to be in vain. Only who finds no batch ready looks at all.
_LOOK_SECONDS = 0.2
# For the batch being made. A trainer that was asked to stop may have five seconds to be gone.
_PATIENCE = 1.0
_NAME = "batches"


class WaitInterrupted(Exception):
    """There was no batch yet, and who waited for it is wanted elsewhere."""


class AheadBatches:
    """The batches of ``source``, the same in the same order, some of them made ahead.

    As many as ``most``, or as come to ``most_bytes`` together, but always two, and as many as are
    taken ``at_once`` unless these come to ``most_bytes_at_once``. For a GPU they lie in page-locked
    memory, from which copies wait for nothing. What the source raises is raised where its batch is
    taken. ``interrupted``: asked five times a second by who waits for a batch; ``WaitInterrupted``
    is raised where it says so, and the batch is still the next.

    The thread begins with the first batch that is asked for, and ends with ``close``, with the end
    of the data, or with an error. Until it has ended ``source`` is its alone.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        device: torch.device,
        *,
        at_once: int = 1,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        most_bytes_at_once: int = _MOST_BYTES_AT_ONCE,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._batches = source
        self._device = device
        self._at_once = at_once
        self._most = most
        self._most_bytes = most_bytes
        self._most_bytes_at_once = most_bytes_at_once
        self._interrupted = interrupted
        self._changed = threading.Condition()
        self._made: deque[_Made] = deque()
        self._bytes = 0
        self._closing = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        made = self._take()
        if made.batch is None:
            raise StopIteration
        return made.batch

    def _take(self) -> _Made:
        with self._changed:
            if self._thread is None and not self._closing:
                self._start()
            while not self._made:
                if self._closing:
                    raise RuntimeError("the batches have been closed")
                if self._ended:
                    raise RuntimeError("the thread that makes batches died without a word")
                if self._interrupted():
                    raise WaitInterrupted
                self._changed.wait(_LOOK_SECONDS)
            made = self._made[0]
            if made.batch is not None:
                self._made.popleft()
                self._bytes -= made.batch.nbytes
                self._changed.notify_all()
        if made.error is not None:
            raise made.error
        return made

    def close(self) -> None:
        """Ends the thread, and drops what it has made. May be called again, or before it began.

        Waits for the batch that is being made. A read that does not return is left to itself.
        """
        with self._changed:
            self._closing = True
            self._made.clear()
            self._bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _start(self) -> None:
        # As a daemon it keeps no process alive that is to end.
        thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        try:
            # A thread begins on the first GPU, which may be another rank's.
            on_gpu = self._device.type == "cuda"
            with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
                batches = iter(self._batches)
                while self._wait_for_room():
                    batch = next(batches, None)
                    state = self._place()
                    self._hand_over(_Made(batch.pinned() if batch and on_gpu else batch, state))
                    if batch is None:
                        return
        except BaseException as error:  # raised where the batch would have been taken
            self._hand_over(_Made(None, {}, error))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _place(self) -> dict[str, Any]:
        """Where the source stands behind the batch that it has just given."""
        return {}

    def _hand_over(self, made: _Made) -> None:
        with self._changed:
            if not self._closing:
                self._made.append(made)
                self._bytes += 0 if made.batch is None else made.batch.nbytes
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """False where there is to be no further batch."""
        with self._changed:
            while not self._closing and self._is_full():
                self._changed.wait()
            return not self._closing

    def _is_full(self) -> bool:
        count = len(self._made)
        if count < 2:
            return False
        if count < self._at_once:
            return self._bytes >= self._most_bytes_at_once
        return count >= self._most or self._bytes >= self._most_bytes


class PrefetchedBatches(AheadBatches):
    """Batches for training, made ahead, with the place behind those that were taken."""

    def __init__(self, source: TrainingBatches, device: torch.device, **options: Any) -> None:
        super().__init__(source, device, **options)
        self._source = source
        self._state = source.state_dict()

    @property
    def statistics(self) -> Statistics:
        """Of the batches that were taken."""
        return Statistics(**self._state["statistics"])

    def state_dict(self) -> dict[str, Any]:
        """Where the last batch that was taken ends, as the source says it."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the place that ``state`` tells of; what was made ahead is thrown away.

        Raises what the source raises.
        """
        self.close()
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the data is still being read, and cannot go to another place")
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
        self._thread, self._closing, self._ended = None, False, False

    def _take(self) -> _Made:
        made = super()._take()
        self._state = made.state
        return made

    def _place(self) -> dict[str, Any]:
        return self._source.state_dict()


def is_still_reading() -> bool:
    """Whether a thread of this process is at work on a batch, which has nobody to wait for it once
    the run is over.

    Such a process must end at once: where the interpreter is taken down, a thread that comes back
    from the tokenizer's code is ended within it, which aborts the process.
    """
    return any(thread.name == _NAME for thread in threading.enumerate())


@dataclass(frozen=True)
class _Made:
    """A batch and the place behind it; without a batch the end of the data, or an error."""

    batch: Batch | None
    state: dict[str, Any]
    error: BaseException | None = None
