"""A run's folder: where everything lies, one trainer at a time, one spec for its whole life."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp8core.durable import PARTIAL_PREFIX, told_when_full, write_json
from fp8core.errors import SpecRefused, TrainingError
from fp8core.spec import JobSpec, SpecInvalid, parse_spec
from fp8core.training.ranks.place import FOLDER_PREFIX, FOLDER_VARIABLE

__all__ = ["Workdir"]

# What may change between two runs of a workdir: it has no part in how a step is computed.
_FREE = frozenset(
    {
        "checkpoint",
        "labels",
        "limits",
        "name",
        "notes",
        "priority",
        "telemetry",
    }
)

# What lies under these names must be what a run puts there: a pipe would be waited for, and a link
# would be written through.
_FOLDERS = frozenset({"checkpoints", "model", "sinks", "tensorboard", "tokenizer", "wandb"})
_FILES = frozenset(
    {
        "conversion.json",
        "crash.log",
        "parity.json",
        "precision.json",
        "report.json",
        "result.json",
        "spec.json",
        "telemetry.jsonl",
    }
)


class Workdir:
    """The folder of one run and the names in it. Hold it open (``with``) while training."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.spec = self.path / "spec.json"
        self.telemetry = self.path / "telemetry.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.conversion = self.path / "conversion.json"
        self.report = self.path / "report.json"
        self.precision = self.path / "precision.json"
        self.parity = self.path / "parity.json"
        self.result = self.path / "result.json"
        self.crash_log = self.path / "crash.log"
        self.tokenizer = self.path / "tokenizer"
        """Tokenizer and model config, as they are saved with every checkpoint."""
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            with told_when_full(self.path):
                self._take()
        except (OSError, ValueError) as error:
            self._let_go()
            reason = getattr(error, "strerror", None) or str(error)
            raise SpecRefused(f"cannot use {self.path} as workdir: {reason}") from error
        except BaseException:
            self._let_go()
            raise
        return self

    def _take(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self.path / ".lock", flags, 0o644)
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            raise ValueError("its .lock is not a regular file")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"another trainer is at work in {self.path}") from None
        here = os.environ.get(FOLDER_VARIABLE)
        for path in self.path.iterdir():
            # Of a launcher that was killed; our own is what our environment names.
            of_ranks = path.name.startswith(FOLDER_PREFIX) and str(path) != here
            if path.name.startswith(PARTIAL_PREFIX) or of_ranks:
                _remove(path)
            elif path.name in _FOLDERS and (path.is_symlink() or not path.is_dir()):
                raise ValueError(f"its {path.name} is not a folder")
            elif path.name in _FILES and (path.is_symlink() or not path.is_file()):
                raise ValueError(f"its {path.name} is not a regular file")
        # Whoever reads a result must not find that of an earlier run.
        self.result.unlink(missing_ok=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def adopt(self, spec: JobSpec) -> None:
        """Writes ``spec`` as this workdir's own.

        Raises ``SpecRefused``, with the pointer of the first difference, when checkpoints of
        another spec lie here: to go on from them would be neither run. A spec of an older version
        is the one that it means today. Checkpoints without any spec beside them were put here by
        somebody who knows whose they are.
        """
        wanted = spec.resolved()
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*")):
            present = self._present()
            if present is not None:
                pointer = _first_difference(
                    {key: value for key, value in present.items() if key not in _FREE},
                    {key: value for key, value in wanted.items() if key not in _FREE},
                )
                if pointer is not None:
                    raise SpecRefused(
                        f"differs from the spec whose checkpoints lie in {self.path}; go on with "
                        "that spec, or use another workdir",
                        pointer=pointer,
                    )
        write_json(self.spec, wanted)

    def _present(self) -> dict[str, Any] | None:
        """The spec that lies here; as it was written, where this version does not take it."""
        try:
            present = json.loads(self.spec.read_bytes())
            if not isinstance(present, dict):
                raise ValueError("no JSON object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise SpecRefused(
                f"{self.spec} cannot be read ({error}), so that nobody can tell whether the "
                "checkpoints beside it are of this spec; put it back, or remove it if they are"
            ) from error
        try:
            return parse_spec(present).resolved()
        except SpecInvalid:
            return present

    def crash_log_of(self, rank: int) -> Path:
        """Where the traceback of another rank than 0 goes."""
        return self.path / f"crash-rank-{rank}.log"

    def relative(self, path: Path) -> str:
        """``path`` as telemetry names it."""
        return path.relative_to(self.path).as_posix()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _first_difference(one: Any, other: Any, pointer: str = "") -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            escaped = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in one or key not in other:
                return escaped
            found = _first_difference(one[key], other[key], escaped)
            if found is not None:
                return found
        return None
    return None if one == other else pointer
