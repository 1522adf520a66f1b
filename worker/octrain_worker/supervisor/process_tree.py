"""Finding and ending processes, by walking ``/proc``.

A trainer's descendants start sessions and groups of their own (torchrun's ranks do, data loaders
may), so a process group is not enough. Under a child subreaper every orphan becomes the subreaper's
child: its descendants are found by parent ids alone, however they detach. A process id is used only
together with its start time, and signalled through a pidfd, so a reused id is never hit. A zombie
counts as dead: where process 1 does not reap, it stays for ever and holds nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Process",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "end_processes",
    "is_alive",
    "read_process",
    "send_signal",
    "with_environment",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_KTHREAD = 0x00200000  # Linux, include/linux/sched.h
_LOADING_SECONDS = 0.05
# Loaded at import: between fork and exec nothing may be loaded.
_LIBC = ctypes.CDLL(None, use_errno=True)
_DEAD = frozenset({"Z", "X", "x"})


@dataclass(frozen=True)
class Process:
    """A process as ``/proc/<pid>/stat`` shows it; ``start_ticks`` is clock ticks since boot."""

    pid: int
    parent: int
    session: int
    state: str
    start_ticks: int
    of_kernel: bool = False

    @property
    def dead(self) -> bool:
        return self.state in _DEAD


def read_process(pid: int) -> Process | None:
    """The process with this id, a zombie included; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; the fields proper begin after the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        start_ticks=int(fields[19]),
        of_kernel=bool(int(fields[6]) & _PF_KTHREAD),
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the process that had this id and start time runs still. A zombie does not."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and not process.dead


def descendants(root: int) -> list[Process]:
    """Every living process below ``root``, which itself is not among them."""
    children: dict[int, list[Process]] = {}
    for process in _all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            waiting.append(child.pid)
            if not child.dead:
                found.append(child)
    return found


def with_environment(name: str, value: str) -> list[Process]:
    """Every living process that was started with the environment variable ``name=value``."""
    wanted = f"{name}={value}".encode()
    found = []
    for process in _all_processes():
        if process.dead or process.pid == os.getpid():
            continue
        if wanted in _environment(process).split(b"\0"):
            found.append(process)
    return found


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signals exactly this process; nothing happens if it is gone or not ours to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The pidfd holds whatever has the id now; the start time says whether it is the one.
            if is_alive(process.pid, process.start_ticks):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def end_processes(
    find: Callable[[], Iterable[Process]],
    *,
    grace: float,
    patience: float,
    reap: Callable[[], None] = lambda: None,
    poll: float = 0.02,
) -> bool:
    """Ends all that ``find`` finds, again and again until it finds none: SIGTERM, then SIGKILL.

    ``grace`` seconds lie between the two; 0 sends SIGKILL at once. Returns False when something
    still lives after ``patience`` seconds (a process inside a driver's call cannot be killed).
    """
    started = time.monotonic()
    told: set[tuple[int, int]] = set()
    while True:
        reap()
        living = list(find())
        if not living:
            return True
        elapsed = time.monotonic() - started
        if elapsed > patience:
            return False
        for process in living:
            if elapsed >= grace:
                send_signal(process, signal.SIGKILL)
            elif (process.pid, process.start_ticks) not in told:
                told.add((process.pid, process.start_ticks))
                send_signal(process, signal.SIGTERM)
        time.sleep(poll)


def become_subreaper() -> None:
    """Makes this process the parent of every orphan among its descendants.

    Raises ``OSError`` where the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """To be called in a new child: SIGKILL when the thread that started it ends.

    ``parent`` is the process that must still be there: it may have died before this call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _environment(process: Process) -> bytes:
    """What the process was started with; empty when it is gone or not ours to read.

    While the kernel loads a program it shows neither environment nor command line, for a moment
    after ``exec`` has closed the old one's descriptors (Linux, ``begin_new_exec`` in fs/exec.c and
    ``create_elf_tables`` in fs/binfmt_elf.c). Such a process is read again: passed by, it would
    outlive what looks for it. One that was given neither costs ``_LOADING_SECONDS``.
    """
    deadline = time.monotonic() + _LOADING_SECONDS
    loaded = False
    while True:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if environment or loaded or process.of_kernel or time.monotonic() > deadline:
                return environment
            # It may have been loaded since, so what this says holds for the next look alone.
            loaded = bool(Path(f"/proc/{process.pid}/cmdline").read_bytes())
        except OSError:
            return b""
        if not is_alive(process.pid, process.start_ticks):
            return b""
        time.sleep(0.001)


def _all_processes() -> Iterable[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read_process(int(name))) is not None:
            yield process
