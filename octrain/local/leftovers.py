"""Supervisors and trainers of a stack that its workers did not end in time.

A supervisor lives in a session of its own and outlives its worker by design, so a stack that stops
looks for what still belongs to it: by the mark in the environment, or by the data folder on the
command line of our own programs, with all descendants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from octrain.local.commands import STACK_VARIABLE
from octrain.local.processes import POLL_SECONDS, descendants, is_alive, processes

_PROGRAMS = (b"octrain_worker", b"fp8core", b"octrain_api")


def processes_of(data_dir: Path, spared: Collection[int] = ()) -> list[int]:
    """Live processes of the stack on ``data_dir``, but ours and the spared ones."""
    mark = f"{STACK_VARIABLE}={data_dir}".encode()
    found: set[int] = set()
    for pid in processes():
        if pid == os.getpid() or pid in spared or not is_alive(pid):
            continue
        if mark in _read(pid, "environ").split(b"\0") or _names(data_dir, _read(pid, "cmdline")):
            found.add(pid)
            found.update(descendants(pid))
    return sorted(found - set(spared) - {os.getpid()})


def end_leftovers(data_dir: Path, spared: Collection[int] = (), seconds: float = 2.0) -> list[int]:
    """SIGKILL them until none is left or the time is over; those that were found."""
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while left := processes_of(data_dir, spared):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    for pid in ended:  # those that became our children: no zombie stays
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return sorted(ended)


def _names(data_dir: Path, command: bytes) -> bool:
    words = command.split(b"\0")
    folder = str(data_dir).encode()
    ours = any(word.startswith(_PROGRAMS) for word in words)
    return ours and any(w == folder or w.startswith(folder + b"/") for w in words)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
