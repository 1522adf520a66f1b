"""What a supervisor's threads know of the API: the wanted state, the lease, whether it is disowned.

The heartbeat thread lives here. It goes on through everything else the supervisor does (a long
download, the killing of a stubborn trainer, uploads), for the lease must not end meanwhile.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octrain_worker.api_client import (
    ApiClient,
    ApiRefused,
    ApiUnavailable,
    StaleAttempt,
    Wanted,
    WishAnswer,
)
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.clock import boot_id
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.spool import Entry, Spool

__all__ = ["Link", "Wish"]

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_SAY_AFTER_SECONDS = 10.0


@dataclass(frozen=True)
class Wish:
    """What the service wants of the attempt. ``stop_by`` is on the boot clock, infinite without a
    deadline; ``reason`` is None when a user wants it."""

    wanted: Wanted = "run"
    reason: str | None = None
    stop_by: float = math.inf


class Link:
    """One attempt's connection. Attributes are read by every thread, written as noted."""

    def __init__(
        self,
        client: ApiClient,
        folder: AttemptFolder,
        token: int | str,
        *,
        lease: Lease,
        interval: float,
        poke: Callable[[], None],
    ) -> None:
        self.client = client
        self.attempt_id = folder.attempt_id
        self.token = token
        self.lease = lease
        # The newest one heard, whichever call it came with.
        self.wish = Wish()
        self._wish_asked_at = -math.inf
        self._wish_lock = threading.Lock()
        # Why nothing may be written any more; written once, by whichever thread learns it.
        self.stale: str | None = None
        # Set by the main thread for the heartbeats to carry.
        self.phase: str | None = None
        self.step: int | None = None
        # Events from any thread, for the main thread to spool.
        self.notes: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        # Set when the threads are to end.
        self.closed = threading.Event()
        self.training = True
        self._lease_file = threading.Lock()
        self._folder = folder
        self._interval = interval
        self._poke = poke
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._write_lease()
        self._thread.start()

    def close(self) -> None:
        self.closed.set()

    def hear(self, sent_at: float, answer: WishAnswer) -> None:
        """An answer says what is wanted; it was asked for at ``sent_at``.

        Seconds that are left count from before the question, so this side is never late.
        """
        within = answer.stop_within_seconds
        stop_by = math.inf if within is None else sent_at + within
        with self._wish_lock:
            if sent_at < self._wish_asked_at:
                return
            self._wish_asked_at = sent_at
            before = self.wish
            self.wish = Wish(answer.wanted, answer.wanted_reason, stop_by)
        if self.wish != before:
            self._poke()

    def telemetry(self, first_seq: int, records: Sequence[dict[str, Any]]) -> int:
        """Sends records numbered from ``first_seq``; returns the last number the API has."""
        sent_at = self.lease.clock()
        answer = self.client.telemetry(self.attempt_id, self.token, first_seq, records)
        self.hear(sent_at, answer)
        return answer.acknowledged_seq

    def disown(self, why: str) -> None:
        """The API says that the attempt is not this supervisor's."""
        if self.stale is None:
            logger.warning("attempt %s is disowned: %s", self.attempt_id, why)
            self.stale = why
            self.closed.set()
        self._poke()

    def note(self, kind: str, message: str, **data: Any) -> None:
        """An event for the job's history."""
        logger.info("%s: %s", kind, message)
        record = {"type": "event", "time": time.time(), "kind": kind}
        self.notes.put({**record, "message": message[:4000], "data": data})
        self._poke()

    def spool_notes(self, spool: Spool) -> bool:
        """Puts the noted events into the spool (main thread only); whether there were any."""
        notes = []
        while not self.notes.empty():
            notes.append(self.notes.get())
        if not notes:
            return False
        try:
            spool.append([Entry(note) for note in notes])
        except OSError as error:
            logger.error("events are kept back, the spool cannot be written: %s", error)
            for note in notes:
                self.notes.put(note)
        return True

    def end_of_training(self) -> None:
        """No process of the trainer lives: the lease no longer guards anything on this machine."""
        with self._lease_file:
            self.training = False
            self._folder.lease.unlink(missing_ok=True)

    def _beat(self) -> None:
        away_since: float | None = None
        said = False
        pause = self._interval
        while not self.closed.wait(pause):
            sent_at = self.lease.clock()
            try:
                answer = self.client.heartbeat(
                    self.attempt_id,
                    self.token,
                    phase=self.phase,
                    step=self.step,
                    lease_number=self.lease.number,
                )
            except StaleAttempt as error:
                self.disown(str(error))
                return
            except (ApiUnavailable, ApiRefused) as error:
                away_since = sent_at if away_since is None else away_since
                if not said and sent_at - away_since >= _SAY_AFTER_SECONDS:
                    said = True
                    logger.warning("the API is away, training goes on: %s", error)
                pause = min(self._interval, _RETRY_SECONDS)
                continue
            # A stop first: its lease may be short, and must not be taken for one that runs out.
            self.hear(sent_at, answer)
            self.lease.grant(sent_at, answer.lease_seconds, answer.lease_number)
            self._write_lease()
            if said and away_since is not None:
                seconds = round(self.lease.clock() - away_since, 1)
                message = f"the API could not be reached for {seconds} s; training went on"
                self.note("api_was_unreachable", message, seconds=seconds)
            away_since, said, pause = None, False, self._interval

    def _write_lease(self) -> None:
        # Written once more after the end of training it would never be renewed, and the agent would
        # end this supervisor for it.
        with self._lease_file:
            if not self.training:
                return
            lease = {"ends_at": self.lease.ends_at, "boot": boot_id()}
            try:
                write_private(self._folder.lease, lease)
            except OSError as error:
                # Only the agent's second look at a frozen supervisor needs it, and that must not
                # take the last one for the present one.
                logger.warning("the lease could not be written down: %s", error)
                self._folder.lease.unlink(missing_ok=True)
