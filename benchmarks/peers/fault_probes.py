"""The probes of `accelerate_faults`: what to do with a side, and when what was seen is right.

Each probe does one thing with a small model and writes down what it saw. Whether that is right is
decided by one function for both sides, from these observations alone.
"""

from __future__ import annotations

from peers import conversion_probes, training_probes
from peers.probe_parts import Probe

PROBES: tuple[Probe, ...] = tuple(
    sorted(
        (*conversion_probes.PROBES, *training_probes.PROBES),
        key=lambda probe: int(probe.number.rstrip("abc")),
    )
)
