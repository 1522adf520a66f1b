"""How much more memory a process had at its peak while it did something.

Not by ``ru_maxrss``: a process that another one starts begins with the peak of that one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["printed_bytes", "watched_peak"]


@contextmanager
def watched_peak() -> Iterator[list[int]]:
    """The list holds, behind the block, the bytes beyond those that were resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now: proc(5)
    before, found = _bytes("VmRSS"), list[int]()
    yield found
    found.append(_bytes("VmHWM") - before)


def printed_bytes(script: str) -> int:
    """The number that ``script`` prints; it runs in a process of its own, whose memory is nobody
    else's and goes back as soon as it is freed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, status
    return 1024 * int(match[1])
