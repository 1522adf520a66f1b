"""When a trainer is to stop, and when it has had its time.

Two phases and an end. First the trainer is asked (SIGTERM): it finishes its step, saves, leaves. At
the deadline every process below the supervisor gets SIGTERM, and after a grace SIGKILL, also those
in sessions of their own. The deadline of a pause or cancel is the service's, told as seconds that
are left and counted here from before the question was sent; a shutdown has this node's own, and at
the end of the lease there is no grace.
"""

from __future__ import annotations

import logging
import math
from enum import Enum

from octrain_worker.settings import SupervisorSettings
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.outcome import StopCause
from octrain_worker.supervisor.wakeup import Wakeup

__all__ = ["StopStep", "Stopping"]

logger = logging.getLogger(__name__)


class StopStep(Enum):
    """What is to be done to the trainer now."""

    NOTHING = "nothing"
    ASK = "ask"
    END = "end"


class Stopping:
    """Asked again and again by the main thread while a trainer lives.

    ``patience``: seconds for a pause or cancel of which the service does not say how long it may
    take. ``cause`` is why the trainer was told to stop; None while nobody wants it.
    """

    def __init__(
        self, link: Link, wakeup: Wakeup, settings: SupervisorSettings, *, patience: float
    ) -> None:
        self.cause: StopCause | None = None
        # Why the service wants it; None when a user does.
        self.reason: str | None = None
        self._link = link
        self._wakeup = wakeup
        self._settings = settings
        self._patience = patience
        self._deadline = math.inf

    def decide(self) -> StopStep:
        """What is due. ``ASK`` comes once; ``END`` as long as the trainer lives on."""
        now = self._link.lease.clock()
        wanted = self._wanted()
        first = False
        if wanted is not None and wanted is not self.cause:
            first = self.cause is None
            self.cause = wanted
            self.reason = self._link.wish.reason if wanted in _OF_THE_SERVICE else None
            if wanted is StopCause.SHUTDOWN:
                self._deadline = min(self._deadline, now + self._settings.shutdown_grace_seconds)
            elif wanted in _OF_THE_SERVICE:
                self._deadline = min(self._deadline, now + self._patience)
            logger.info("stopping the trainer: %s", wanted)
        if self.cause in _OF_THE_SERVICE and self._link.wish.stop_by < math.inf:
            self._deadline = self._link.wish.stop_by
        if self.fenced or now >= self._deadline or self._wakeup.terminations > 1:
            self.cause = self.cause or StopCause.LEASE
            return StopStep.END
        return StopStep.ASK if first else StopStep.NOTHING

    @property
    def fenced(self) -> bool:
        """Whether the lease is so near its end that nothing may live on."""
        return self._link.lease.clock() >= self._link.lease.kill_at

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL at the end."""
        at_once = self.fenced or self._wakeup.terminations > 1
        return 0.0 if at_once else self._settings.leftover_grace_seconds

    def _wanted(self) -> StopCause | None:
        """The weightiest reason to stop now; one given before is only replaced by a cancel, a
        pause also by a shutdown."""
        if self._link.wish.wanted == "cancel":
            return StopCause.CANCEL
        if self.cause is not None and self.cause is not StopCause.PAUSE:
            return None
        if self._wakeup.terminations:
            return StopCause.SHUTDOWN
        if self.cause is not None:
            return None
        if self._link.wish.wanted == "pause":
            return StopCause.PAUSE
        if self._link.lease.stopping:
            return StopCause.LEASE
        return None


_OF_THE_SERVICE = frozenset({StopCause.CANCEL, StopCause.PAUSE})
