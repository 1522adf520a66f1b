"""The shipper: sends the spool to the API in numbered batches, until the API has all of it.

Exactly once comes from the numbers: the API skips what it has and refuses a gap, the spool never
gives one number to two records, so a batch whose answer was lost is simply sent again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from octrain_worker.api_client import ApiRefused, ApiUnavailable, SequenceGap, StaleAttempt
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.spool import Spool

__all__ = ["BATCH_BYTES", "BATCH_RECORDS", "Shipper"]

logger = logging.getLogger(__name__)

# A batch has at most so many records, and so many bytes of them in the spool: metrics shrink to a
# fifth of that on the way. What comes more slowly is sent twice a second.
BATCH_RECORDS = 1000
BATCH_BYTES = 4 << 20
_BATCH_SECONDS = 0.5
_LONGEST_PAUSE = 5.0


class Shipper:
    """A thread that drains ``spool`` over ``link``."""

    def __init__(self, spool: Spool, link: Link) -> None:
        self._spool = spool
        self._link = link
        self._after = spool.acknowledged_seq
        self._wake = threading.Event()
        self._hurry = False
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something new in the spool."""
        self._wake.set()

    def hurry(self) -> None:
        """The end is near: batches are no longer spaced."""
        self._hurry = True
        self._wake.set()

    @property
    def drained(self) -> bool:
        return self.has_told(self._spool.last_seq)

    def has_told(self, number: int) -> bool:
        """Whether the API has every record up to this number."""
        return self._spool.acknowledged_seq >= number

    def _run(self) -> None:
        closed = self._link.closed
        pause = 0.1
        while not closed.is_set():
            try:
                first, records = self._spool.read(
                    self._after, limit=BATCH_RECORDS, max_bytes=BATCH_BYTES
                )
            except OSError as error:
                logger.warning("the spool cannot be read now: %s", error)
                closed.wait(_LONGEST_PAUSE)
                continue
            if not records:
                self._wake.wait(0.5)
                self._wake.clear()
                continue
            try:
                self._send(first, records)
            except ApiUnavailable as error:
                logger.debug("telemetry waits: %s", error)
                closed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            except StaleAttempt as error:
                self._link.disown(str(error))
                return
            except Exception:  # the attempt could not end without this thread
                logger.exception("telemetry could not be sent, it is tried again")
                closed.wait(_LONGEST_PAUSE)
                continue
            pause = 0.1
            if not self._hurry and len(records) < 100:
                closed.wait(_BATCH_SECONDS)

    def _send(self, first: int, records: list[dict[str, Any]]) -> None:
        link = self._link
        try:
            acknowledged = link.telemetry(first, records)
        except SequenceGap as gap:
            # The API lost what it had acknowledged (a restored database), or answers for less.
            if gap.expected - 1 == self._after:
                raise ApiUnavailable(f"record {first} was refused as a gap") from gap
            self._after = gap.expected - 1
            return
        except ApiRefused as error:
            if error.status in (401, 403, 404):
                raise ApiUnavailable(str(error)) from error
            self._send_one_by_one(first, records, error)
            return
        self._acknowledge(acknowledged)

    def _send_one_by_one(
        self, first: int, records: list[dict[str, Any]], refusal: ApiRefused
    ) -> None:
        """Finds the record that the API will not take, and sends a note of it in its place: one
        bad record must not hold up the rest for ever."""
        if len(records) > 1:
            middle = len(records) // 2
            self._send(first, records[:middle])
            if self._after == first + middle - 1:
                self._send(first + middle, records[middle:])
            return
        logger.error("the API refuses record %d: %s: %.500r", first, refusal, records[0])
        kind = str(records[0].get("type"))
        substitute = {
            "type": "event",
            "time": records[0].get("time"),
            "kind": "record_refused",
            "message": f"a record of type {kind} was refused by the API: {refusal}"[:2000],
            "data": {"type": kind},
        }
        link = self._link
        try:
            answer = link.telemetry(first, [substitute])
        except ApiRefused as error:
            raise ApiUnavailable(str(error)) from error
        self._acknowledge(answer)

    def _acknowledge(self, number: int) -> None:
        self._after = number
        self._spool.acknowledge(number)
