"""Precision engines behind one protocol: which can run here, and how to make one.

from fp8core.engines import availability, create
"""

from __future__ import annotations

from fp8core.engines.protocol import Availability, Engine, NormDescription
from fp8core.engines.registry import all_availability, availability, create

__all__ = [
    "Availability",
    "Engine",
    "NormDescription",
    "all_availability",
    "availability",
    "create",
]
