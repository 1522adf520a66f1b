"""Starting the ranks of a job, and one account of how they ended.

The launcher is the process that a caller sees: it takes SIGTERM for all ranks, and its exit code
and ``result.json`` are those of the rank that decided. Below it torchrun starts the ranks and
watches them. When one fails, or dies without a word, the others are given a few seconds to notice,
for they may sit in an exchange that will never end, and are then killed. If the launcher is killed,
all below it is (see ``place.die_with_parent``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fp8core.durable import told_when_full
from fp8core.spec.outcomes import ExitCode, Outcome, Reason
from fp8core.stored_json import decode_object, read_json
from fp8core.training.outcome import RunResult
from fp8core.training.ranks.place import (
    FOLDER_PREFIX,
    FOLDER_VARIABLE,
    RankEnd,
    RankPlace,
    is_gone,
    parent_of,
)

__all__ = ["Failure", "Launcher", "judge"]

_POLL_SECONDS = 0.1
# From the first failure to SIGKILL of what still runs.
_GRACE_SECONDS = 5.0
# For a process that was killed to be gone: on a busy machine, or while a driver lets its memory go.
_DEATH_SECONDS = 30.0
# A terminal, a shell and a supervisor may all pass on one and the same request.
_SAME_REQUEST_SECONDS = 1.0
_TAIL_BYTES = 1 << 16
_AGENT = "fp8core.training.ranks.agent"


@dataclass(frozen=True)
class Failure:
    """A rank that torchrun saw end: ``exit_code`` negative for a signal."""

    rank: int
    exit_code: int
    time: float


class Launcher:
    """Runs ``command`` (arguments of ``python -m fp8core``) as ``ranks`` ranks, once."""

    def __init__(self, command: Sequence[str], ranks: int, workdir: Path) -> None:
        self._command = command
        self._ranks = ranks
        self._workdir = workdir
        self._requests: list[float] = []
        self._told: set[int] = set()
        self._seen: set[int] = set()
        self._failed_at: float | None = None

    def run(self) -> RunResult:
        """Waits for the end of all ranks and says what came of them.

        No process started here lives when it returns. Raises ``StorageFull``, ``OSError``.
        """
        folder = self._workdir / f"{FOLDER_PREFIX}{secrets.token_hex(8)}"
        with told_when_full(folder):
            folder.mkdir(parents=True)
        places = [RankPlace(rank, self._ranks, folder) for rank in range(self._ranks)]
        before = {number: signal.signal(number, self._note) for number in _STOPS}
        agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT, str(self._ranks), *self._command],
            env=self._environment(folder),
            # Ctrl-C on a terminal is for this process alone, which passes it on.
            start_new_session=True,
        )
        try:
            while agent.poll() is None:
                self._pass_on(places)
                self._end_when_due(places, agent)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(_POLL_SECONDS)
            ends = [place.read_end() for place in places]
            return judge(ends, _failures(folder), self._ranks, _last_step(self._workdir))
        finally:
            agent.kill()
            agent.wait()
            _kill(places)
            _wait_until_gone(places)
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def hurried(self) -> bool:
        """Whether a second request said that there is no time to save."""
        return len(self._requests) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._requests or now - self._requests[-1] > _SAME_REQUEST_SECONDS:
            self._requests.append(now)

    def _pass_on(self, places: Sequence[RankPlace]) -> None:
        """Tells each rank once, as soon as it can take it."""
        stopped = any(end.result["outcome"] == Outcome.STOPPED for end in _ends(places))
        if not self._requests and not stopped:
            return
        for place in places:
            pid = place.read_pid()
            if pid is not None and place.rank not in self._told and place.read_end() is None:
                self._told.add(place.rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _end_when_due(self, places: Sequence[RankPlace], agent: subprocess.Popen[bytes]) -> None:
        if self.hurried:
            _kill(places)
            agent.kill()
            return
        now = time.monotonic()
        if self._failed_at is None and self._somebody_failed(places):
            self._failed_at = now
        if self._failed_at is None or now < self._failed_at + _GRACE_SECONDS:
            return
        _kill(places)
        # torchrun has seen who failed first, and ends by itself once nothing is left to wait for.
        if now > self._failed_at + 2 * _GRACE_SECONDS:
            agent.kill()

    def _somebody_failed(self, places: Sequence[RankPlace]) -> bool:
        for place in places:
            end, pid = place.read_end(), place.read_pid()
            if end is not None:
                if end.result["outcome"] == Outcome.FAILED:
                    return True
            elif pid is not None and parent_of(pid) is None and place.read_end() is None:
                return True
        return False

    def _environment(self, folder: Path) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0))
        return {
            "OMP_NUM_THREADS": str(max(1, cores // self._ranks)),
            **os.environ,
            FOLDER_VARIABLE: str(folder),
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
        }


_STOPS = (signal.SIGTERM, signal.SIGINT)


def judge(
    ends: Sequence[RankEnd | None], failures: Sequence[Failure], ranks: int, step: int = 0
) -> RunResult:
    """One result of all ranks. ``ends``: by rank, None where a rank left no word.

    ``step``: how far the run is known to have come, for ranks that did not say.

    Rank 0's success is the job's: it comes when all is saved. Else the first failure of a rank by
    itself counts, then a stop, then the failures of ranks that only lost the others.
    """
    said = [end for end in ends if end is not None]
    step = max((int(end.result["step"]) for end in said), default=step)
    main = ends[0]
    if main is not None and main.result["outcome"] == Outcome.SUCCEEDED:
        return _as_result(main, ranks, main.result.get("rank"))
    own: list[tuple[float, RunResult]] = []
    lost: list[tuple[float, RunResult]] = []
    for end in said:
        if end.result["outcome"] == Outcome.FAILED:
            # Where all raise the same, it is told of the rank at fault.
            rank = end.result.get("rank")
            result = _as_result(end, ranks, end.rank if rank is None else rank)
            (lost if end.secondary else own).append((end.time, result))
    for failure in failures:
        if ends[failure.rank] is None:
            own.append((failure.time, _crashed(failure, ranks, step)))
    if own:
        return min(own, key=lambda item: item[0])[1]
    stopped = [end for end in said if end.result["outcome"] == Outcome.STOPPED]
    if stopped:
        return _as_result(stopped[0], ranks, None)
    if lost:
        return min(lost, key=lambda item: item[0])[1]
    return RunResult(
        Outcome.FAILED,
        Reason.TRAINER_CRASHED,
        f"the {ranks} ranks ended without a word, and torchrun with them",
        step,
        ranks=ranks,
    )


def _as_result(end: RankEnd, ranks: int, rank: int | None) -> RunResult:
    result = end.result
    detail = str(result["detail"])
    if rank is not None:
        detail = f"rank {rank} of {ranks}: {detail}"
    return RunResult(
        Outcome(result["outcome"]),
        Reason(result["reason"]),
        detail,
        int(result["step"]),
        ranks=ranks,
        rank=rank,
    )


def _crashed(failure: Failure, ranks: int, step: int) -> RunResult:
    code = failure.exit_code
    name = None
    how = f"ended with exit code {code} and left no word"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        how = f"was ended by {name}"
    return RunResult(
        Outcome.FAILED,
        Reason.TRAINER_CRASHED,
        f"rank {failure.rank} of {ranks} {how}",
        step,
        ranks=ranks,
        rank=failure.rank,
        signal=name,
        code=128 - code if code < 0 else code or int(ExitCode.INTERNAL_ERROR),
    )


def _ends(places: Sequence[RankPlace]) -> list[RankEnd]:
    return [end for place in places if (end := place.read_end()) is not None]


def _failures(folder: Path) -> list[Failure]:
    found = read_json(folder / "failures.json")
    try:
        return [Failure(**each) for each in found]
    except TypeError:  # none of ours, or damaged
        return []


def _last_step(workdir: Path) -> int:
    """The last step that telemetry tells of; 0 where it tells of none."""
    try:
        with (workdir / "telemetry.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        record = decode_object(line) or {}
        if record.get("type") == "progress" and type(record.get("step")) is int:
            return int(record["step"])
    return 0


def _kill(places: Sequence[RankPlace]) -> None:
    for place in places:
        pid = place.read_pid()
        if pid is not None and parent_of(pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _wait_until_gone(places: Sequence[RankPlace]) -> None:
    """What a rank holds in the workdir, its lock first of all, is free after this."""
    deadline = time.monotonic() + _DEATH_SECONDS
    for place in places:
        pid = place.read_pid()
        while pid is not None and not is_gone(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)
