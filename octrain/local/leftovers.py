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
from octrain.local.processes import POLL_SECONDS, descendants, is_alive, processes, runs_a_program

_PROGRAMS = (b"octrain_worker", b"fp8core", b"octrain_api")
_LOADING_SECONDS = 0.05


def processes_of(data_dir: Path, spared: Collection[int] = ()) -> list[int]:
    """Live processes of the stack on ``data_dir``, but ours and the spared ones."""
    mark = f"{STACK_VARIABLE}={data_dir}".encode()
    found: set[int] = set()
    for pid in processes():
        if pid == os.getpid() or pid in spared or not is_alive(pid):
            continue
        environment, command = _started_with(pid)
        if mark in environment.split(b"\0") or _names(data_dir, command):
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


def _started_with(pid: int) -> tuple[bytes, bytes]:
    """Environment and command line, empty where they are not ours to read.

    Of a program that is being loaded the kernel shows neither for a moment after ``exec`` (Linux,
    ``create_elf_tables`` in fs/binfmt_elf.c), as of a thread of its own: such a one is read again,
    or it would outlive the stack.
    """
    deadline = time.monotonic() + _LOADING_SECONDS
    while True:
        environment, command = _read(pid, "environ"), _read(pid, "cmdline")
        # The command line is shown first, so one without an environment is looked at once more.
        if command and not environment:
            environment = _read(pid, "environ")
        if environment or command or time.monotonic() > deadline or not runs_a_program(pid):
            return environment, command
        time.sleep(0.001)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
