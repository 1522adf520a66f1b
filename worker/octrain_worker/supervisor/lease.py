"""The lease: until when, on this machine's boot clock, the trainer may run.

The API grants durations, never times, so clocks need not agree. A duration counts from before the
request was sent: the API's own count starts later, so this side always ends first. The trainer is
told to save and stop a while before the end, and is gone at the end, whether or not the API can be
reached: another attempt may start right after.
"""

from __future__ import annotations

from dataclasses import dataclass

from octrain_worker.clock import Clock, boot_time

__all__ = ["Lease"]

_LONGEST_STOP_MARGIN = 120.0
_LONGEST_KILL_MARGIN = 10.0


@dataclass
class Lease:
    """One attempt's lease; times are seconds of ``clock``."""

    clock: Clock = boot_time
    ends_at: float = 0.0
    seconds: float = 0.0
    # The API's number of this lease, for heartbeats to say that it is held.
    number: int | None = None

    def grant(self, sent_at: float, seconds: float, number: int | None = None) -> None:
        """The API answered a request sent at ``sent_at`` with ``seconds`` of lease.

        They may end sooner than those before: past the deadline of a stop the API holds the
        attempt no longer, and gives its place to another, once it has heard that this one is held.
        """
        # In this order: whoever reads the one without the other stops no sooner than is due.
        self.seconds = seconds
        self.ends_at = sent_at + seconds
        self.number = number

    @property
    def stop_at(self) -> float:
        """When the trainer is to save and stop: a third before the end, at most two minutes."""
        return self.ends_at - min(self.seconds / 3, _LONGEST_STOP_MARGIN)

    @property
    def kill_at(self) -> float:
        """When whatever still runs is killed."""
        return self.ends_at - min(self.seconds / 10, _LONGEST_KILL_MARGIN)

    @property
    def stopping(self) -> bool:
        return self.clock() >= self.stop_at
