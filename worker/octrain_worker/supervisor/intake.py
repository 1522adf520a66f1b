"""What the trainer wrote and the threads noted, on its way into the spool; and what is learnt from
it: the step, the phase, the checkpoints to store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from octrain_worker.clock import boot_time
from octrain_worker.supervisor.collector import Collector
from octrain_worker.supervisor.device_metrics import DeviceMetrics
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Entry, Spool
from octrain_worker.supervisor.uploads import Uploads
from octrain_worker.supervisor.wakeup import Wakeup
from octrain_worker.tracing import AttemptTrace

__all__ = ["Intake"]

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 30.0
# What the API takes (octrain_api.attempts.schemas, HeartbeatRequest).
_LONGEST_PHASE = 64
_LARGEST_STEP = 2**62


class Intake:
    """Used by the main thread alone. ``step`` is the last that the trainer told."""

    def __init__(
        self,
        collector: Collector,
        spool: Spool,
        shipper: Shipper,
        uploads: Uploads,
        link: Link,
        wakeup: Wakeup,
        devices: DeviceMetrics,
        trace: AttemptTrace,
    ) -> None:
        self.step: int | None = None
        self._collector = collector
        self._spool = spool
        self._shipper = shipper
        self._uploads = uploads
        self._link = link
        self._wakeup = wakeup
        self._devices = devices
        self._trace = trace
        self._disk_full = False

    def round(self) -> None:
        """Takes up what is new. A full disk costs nothing: it is taken up later."""
        try:
            records = self._collector.collect()
            self._disk_full = False
        except OSError as error:
            if not self._disk_full:
                logger.error("the spool cannot be written, training goes on: %s", error)
            self._disk_full = True
            return
        self.take(records)
        self._add_sample()
        self._spool_notes()

    def drain(self) -> None:
        """Takes up the rest. What is shipped meanwhile makes room for it on a full disk; when that
        does not help the rest is given up, for the end of the attempt matters more."""
        give_up_at = boot_time() + _DRAIN_SECONDS
        while True:
            try:
                self.take(self._collector.drain())
                self._spool_notes()
                return
            except OSError as error:
                logger.error("the spool cannot be written: %s", error)
                if self._wakeup.terminations > 1 or boot_time() > give_up_at:
                    return
                self._wakeup.wait(1.0)

    def take(self, records: Iterable[dict[str, Any]]) -> None:
        """Learns from records that are in the spool already."""
        records = list(records)
        for record in records:
            # The heartbeats carry both: what the API does not take would cost the lease.
            if record["type"] == "phase":
                phase = record.get("phase")
                if isinstance(phase, str) and len(phase) <= _LONGEST_PHASE and phase.isprintable():
                    self._link.phase = phase
            elif record["type"] in ("progress", "metrics"):
                step = record.get("step")
                if type(step) is int and 0 <= step <= _LARGEST_STEP:
                    self.step = self._link.step = step
        self._trace.hear(records)
        told = functools.partial(self._shipper.has_told, self._spool.last_seq)
        self._uploads.add_records(records, told)
        self._shipper.wake()

    def _add_sample(self) -> None:
        record = self._devices.due(self.step)
        if record is None:
            return
        try:
            self._spool.append([Entry(record)])
        except OSError as error:  # a full disk, and there will be another sample
            logger.debug("a sample of the devices is not kept: %s", error)
        self._shipper.wake()

    def _spool_notes(self) -> None:
        if self._link.spool_notes(self._spool):
            self._shipper.wake()
