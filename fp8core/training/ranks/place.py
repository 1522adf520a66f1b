"""What a rank is told by its environment, and what it leaves behind for the launcher.

Launcher and ranks share a folder: each rank writes its process id into it when it can be asked to
stop, and how it ended. The launcher reads both; no rank reads the other's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.durable import PARTIAL_PREFIX
from fp8core.stored_json import read_object

__all__ = [
    "FOLDER_PREFIX",
    "FOLDER_VARIABLE",
    "RankEnd",
    "RankPlace",
    "die_with_parent",
    "is_gone",
    "parent_of",
]

FOLDER_VARIABLE = "FP8CORE_RANKS_FOLDER"
FOLDER_PREFIX = ".ranks-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended by its own account.

    ``result``: as in ``result.json``. ``time``: seconds since the epoch. ``secondary``: it ended
    because another rank was gone.
    """

    rank: int
    result: dict[str, Any]
    time: float
    secondary: bool


@dataclass(frozen=True)
class RankPlace:
    """One rank among ``count``; ``folder`` is shared with the launcher."""

    rank: int
    count: int
    folder: Path

    @classmethod
    def of_environment(cls) -> RankPlace | None:
        """This process's place; None where the launcher did not start it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder))

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes and reports."""
        return self.rank == 0

    def register(self) -> None:
        """Tells the launcher that this process takes SIGTERM as a request from now on."""
        _write(self.folder / f"pid-{self.rank}", str(os.getpid()))

    def end(self, result: dict[str, Any], *, secondary: bool) -> None:
        value = {"result": result, "time": time.time(), "secondary": secondary}
        _write(self.folder / f"end-{self.rank}", json.dumps(value))

    def read_pid(self) -> int | None:
        try:
            return int((self.folder / f"pid-{self.rank}").read_text())
        except (OSError, ValueError):
            return None

    def read_end(self) -> RankEnd | None:
        value = read_object(self.folder / f"end-{self.rank}") or {}
        result, moment = value.get("result"), value.get("time")
        if not isinstance(result, dict) or not isinstance(moment, int | float):
            return None
        return RankEnd(self.rank, result, float(moment), value.get("secondary") is True)


def die_with_parent() -> None:
    """SIGKILL for this process when the one that started it ends; nothing where that is unknown."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def parent_of(pid: int) -> int | None:
    """The parent of a living process; None for a zombie, or where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; the fields proper begin after the last one.
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return None if state in "ZXx" else int(parent)


def is_gone(pid: int) -> bool:
    """Whether nothing of a process is left but its status, and all its files are closed.

    Of a zombie that had several threads some may still be ending, and they hold the files.
    """
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return True
    return threads <= 1 and parent_of(pid) is None


def _write(target: Path, text: str) -> None:
    partial = target.with_name(f"{PARTIAL_PREFIX}{target.name}")
    partial.write_text(text)
    partial.replace(target)
