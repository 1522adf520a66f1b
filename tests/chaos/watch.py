"""An onlooker at ``/proc``: which trainers live, and whether two of one job ever do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octrain.local.commands import STACK_VARIABLE
from tests.chaos.trainer import ATTEMPT, JOB

__all__ = ["TrainerProcess", "TrainerWatch", "trainers"]

_EVERY_SECONDS = 0.1


@dataclass(frozen=True)
class TrainerProcess:
    """A process of a trainer; ``started`` tells it from a later one of the same id."""

    pid: int
    parent: int
    started: int
    job: str
    attempt: str

    @property
    def alive(self) -> bool:
        fields = _stat(self.pid)
        return (
            fields is not None and fields[0] not in ("Z", "X") and int(fields[19]) == self.started
        )


def trainers(stack: Path) -> list[TrainerProcess]:
    """Every live process of a trainer of the stack on this data folder."""
    found = (_trainer(pid, fields, environment) for pid, fields, environment in _of(stack))
    return [one for one in found if one is not None]


def _of(stack: Path) -> Iterator[tuple[int, list[str], bytes]]:
    """Every live process of the stack: its id, the fields of its stat, its environment."""
    mark = f"{STACK_VARIABLE}={stack}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if mark not in environment or mark not in environment.split(b"\0"):
            continue
        fields = _stat(int(name))
        if fields is not None and fields[0] not in ("Z", "X"):
            yield int(name), fields, environment


def _trainer(pid: int, fields: list[str], environment: bytes) -> TrainerProcess | None:
    values = dict(item.split(b"=", 1) for item in environment.split(b"\0") if item.count(b"=") >= 1)
    if JOB.encode() not in values:
        return None
    return TrainerProcess(
        pid,
        int(fields[1]),
        int(fields[19]),
        values[JOB.encode()].decode(),
        values[ATTEMPT.encode()].decode(),
    )


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


class TrainerWatch:
    """Looks every 0.1 s at a stack's processes. ``doubles`` are the jobs of which two trainers
    lived at one instant.
    """

    def __init__(self, stack: Path) -> None:
        self._stack = stack
        self.doubles: dict[tuple[str, str, str], str] = {}
        self.looks = 0
        self.most = 0
        # By id and the tick of the boot clock at which it started, which no two share.
        self._seen: set[tuple[int, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.look()

    def look(self) -> None:
        self.looks += 1
        by_job: dict[str, list[TrainerProcess]] = {}
        for pid, fields, environment in _of(self._stack):
            self._seen.add((pid, int(fields[19])))
            trainer = _trainer(pid, fields, environment)
            if trainer is not None:
                by_job.setdefault(trainer.job, []).append(trainer)
        self.most = max(self.most, len(by_job))
        for job, found in by_job.items():
            if len(found) > 1:
                self._judge(job, found)

    @property
    def seen(self) -> int:
        """How many processes of the stack were seen, those of all trainers among them."""
        return len(self._seen)

    def living(self) -> list[int]:
        """Those of them that still live, whatever has become of their parents and groups."""
        found = []
        for pid, started in sorted(self._seen):
            fields = _stat(pid)
            if fields is not None and fields[0] not in ("Z", "X") and int(fields[19]) == started:
                found.append(pid)
        return found

    def _judge(self, job: str, found: list[TrainerProcess]) -> None:
        """Two of different attempts are one too many. Of one attempt there are many, the ranks and
        their helpers, but all below one supervisor. The one that was read first may have ended
        before the other began: so both are looked at again, and only one that then still lives
        overlapped."""
        for first in found:
            for second in found:
                if first.pid >= second.pid or not (second.alive and first.alive):
                    continue
                if first.attempt == second.attempt and not _supervised_apart(first, second):
                    continue
                if first.alive and second.alive:
                    names = sorted((first.attempt, second.attempt))
                    self.doubles[job, names[0], names[1]] = (
                        f"{job}: process {first.pid} of {first.attempt} and {second.pid} of "
                        f"{second.attempt}"
                    )


def _supervised_apart(first: TrainerProcess, second: TrainerProcess) -> bool:
    """Whether both are children of supervisors, and of two."""
    return first.parent != second.parent and all(
        "octrain_worker supervise" in _command(one.parent) for one in (first, second)
    )


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
