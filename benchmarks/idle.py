"""Where a GPU stands idle within training steps: between which kernels, in which part of a step.

Reads the kernels of torch's profiler (CUDA activity alone: watching the host too slows it down, and
makes gaps that are not there otherwise). A step's parts are told by its own kernels: forward until
the loss, backward until the update of the weights, then what lies between two steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Gap", "gaps", "print_idle"]

_LONGEST_NAME = 46
_NOTABLE = 10.0
_LOSS, _UPDATE = "loss", "update and norm of gradients"


@dataclass(frozen=True)
class Gap:
    """Microseconds in which nothing ran, and the kernels around them."""

    part: str
    before: str
    after: str
    microseconds: float


def gaps(kernels: Iterable[tuple[str, float, float]], kind_of: Callable[[str], str]) -> list[Gap]:
    """Of kernels as (name, start, end), in microseconds; ``kind_of`` tells their kinds."""
    found = []
    part, busy_until, before = "forward", None, ""
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        kind = kind_of(name)
        if kind == _UPDATE:
            following = "update"
        elif part == "update":
            following = "between steps"
        elif kind == _LOSS:
            following = "backward"
        else:
            following = "forward" if part == "between steps" else part
        if busy_until is not None and start > busy_until:
            found.append(Gap(following, before, name, start - busy_until))
        part = following
        if busy_until is None or end > busy_until:
            busy_until, before = end, name
    return found


def print_idle(
    events: Iterable[Any], kind_of: Callable[[str], str], count: int, rows: int = 12
) -> None:
    """The idle time of a step by part, and the pairs of kernels that it lies between.

    ``events``: a profiler's ``events()``, of ``count`` steps. The first of them is left out: the
    host has no lead yet, and the GPU waits for it.
    """
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
    ]
    found = gaps(kernels, kind_of)
    begins = next((i for i, gap in enumerate(found) if gap.part == "between steps"), 0)
    found, count = found[begins:], max(count - 1, 1)
    parts: dict[str, list[float]] = defaultdict(list)
    pairs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for gap in found:
        parts[gap.part].append(gap.microseconds)
        pairs[gap.part, _short(gap.before), _short(gap.after)].append(gap.microseconds)
    total = sum(gap.microseconds for gap in found) / 1000 / count
    print(f"idle, a step: {total:.2f} ms, in {len(found) / count:.0f} gaps")
    for part, values in sorted(parts.items(), key=lambda item: -sum(item[1])):
        long = [value for value in values if value >= _NOTABLE]
        print(
            f"  {sum(values) / 1000 / count:8.3f} ms  {part}: {len(values) / count:.0f} gaps, "
            f"{len(long) / count:.1f} of {_NOTABLE:.0f} us or more ({sum(long) / 1000 / count:.3f} "
            f"ms), longest {max(values):.0f} us"
        )
    ordered = sorted(pairs.items(), key=lambda item: -sum(item[1]))
    for (part, before, after), values in ordered[:rows]:
        print(
            f"  {sum(values) / 1000 / count:8.3f} ms  {len(values) / count:.1f} x, longest "
            f"{max(values):.0f} us  [{part}]  {before} -> {after}"
        )


def _short(kernel: str) -> str:
    """A kernel's name without types and arguments."""
    name = re.sub(r"^void |<.*|\(.*", "", kernel)
    return name.split("::")[-1][:_LONGEST_NAME] or kernel[:_LONGEST_NAME]
