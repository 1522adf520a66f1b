"""How much more memory a process had at its peak while it did something.

Not by ``ru_maxrss``: a process that another one starts begins with the peak of that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["watched_peak"]


@contextmanager
def watched_peak() -> Iterator[list[int]]:
    """The list holds, behind the block, the bytes beyond those that were resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now: proc(5)
    before, found = _bytes("VmRSS"), list[int]()
    yield found
    found.append(_bytes("VmHWM") - before)


def _bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, status
    return 1024 * int(match[1])
