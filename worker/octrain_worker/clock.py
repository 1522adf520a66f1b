"""The clock of leases: seconds since boot, asleep or not, untouched by changes of the date."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["Clock", "boot_id", "boot_time"]

Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot. Unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    """A name of this boot of the machine: process ids of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
