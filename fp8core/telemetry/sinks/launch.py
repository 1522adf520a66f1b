"""The trainer's side of the sinks: starts them, hears of their troubles, ends them in time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp8core.spec.job import JobSpec
from fp8core.spec.outcomes import Outcome
from fp8core.telemetry.sinks.requirements import check_sinks
from fp8core.telemetry.writer import TelemetryWriter

__all__ = ["Sinks"]

_SILENT_SECONDS = 60.0
_LOOK_SECONDS = 5.0
# From the end of the training to the end of a sink. A stop must not wait long for one.
_PATIENCE_SECONDS = {Outcome.SUCCEEDED: 15.0, Outcome.STOPPED: 2.0, Outcome.FAILED: 5.0}
_FOLDERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Sinks:
    """The sinks that ``spec`` names, at work while this context is open.

    Raises ``SpecRefused`` for one that this machine cannot serve. Set ``outcome`` before the end.
    """

    def __init__(self, spec: JobSpec, workdir: Path, telemetry: TelemetryWriter) -> None:
        wanted = spec.telemetry
        check_sinks(wanted)
        self.outcome = Outcome.FAILED
        self._workdir = workdir
        self._telemetry = telemetry
        settings: dict[str, dict[str, Any]] = {}
        if wanted.tensorboard:
            settings["tensorboard"] = {}
        if wanted.mlflow is not None:
            settings["mlflow"] = wanted.mlflow.model_dump()
        if wanted.wandb is not None:
            settings["wandb"] = wanted.wandb.model_dump()
        self._orders = {
            kind: {
                "telemetry": str(telemetry.path),
                "state": str(workdir / "sinks" / f"{kind}.json"),
                "folder": str(workdir / _FOLDERS.get(kind, "sinks")),
                "settings": chosen,
                "spec": spec.resolved(),
            }
            for kind, chosen in settings.items()
        }
        self._processes: list[_SinkProcess] = []

    def __enter__(self) -> Self:
        if self._orders:
            (self._workdir / "sinks").mkdir(exist_ok=True)
        self._processes = [
            _SinkProcess(kind, order, self._telemetry) for kind, order in self._orders.items()
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Has every sink send the rest, as long as it may take; announces the folders it wrote."""
        if not self._processes:
            return
        outcome = Outcome.FAILED if kind is not None else self.outcome
        deadline = time.monotonic() + _PATIENCE_SECONDS[outcome]
        self._telemetry.flush(_PATIENCE_SECONDS[outcome])
        for process in self._processes:
            process.ask_to_end(outcome)
        for process in self._processes:
            process.end(deadline)
            for folder in process.written():
                relative = folder.relative_to(self._workdir).as_posix()
                self._telemetry.artifact("telemetry", relative, process.step)


class _SinkProcess:
    """One sink, and the thread that listens to it."""

    def __init__(self, kind: str, order: dict[str, Any], telemetry: TelemetryWriter) -> None:
        self.kind = kind
        self.step = 0
        self._order = order
        self._telemetry = telemetry
        self._ending = False
        self._said_failed = False
        self._problem: str | None = None
        self._offset = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fp8core.telemetry.sinks", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )
        self._tell(order)
        self._thread = threading.Thread(target=self._listen, name=f"sink-{kind}", daemon=True)
        self._thread.start()

    def ask_to_end(self, outcome: Outcome) -> None:
        self._ending = True
        self._tell({"outcome": outcome})
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, deadline: float) -> None:
        """Waits for its end until ``deadline``, on the monotonic clock, and then ends it."""
        try:
            code = self._process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._say("sink_failed", self._problem or "it did not end in time; the rest is unsent")
        else:
            if code and not self._said_failed:
                self._say("sink_failed", self._problem or f"it ended with {code}")
        self._thread.join(5.0)

    def written(self) -> list[Path]:
        """The folders, whole now, that are worth keeping."""
        folder = Path(self._order["folder"])
        if self.kind == "tensorboard":
            return [folder] if any(folder.glob("events.out.tfevents.*")) else []
        if self.kind == "wandb" and self._order["settings"]["mode"] == "offline":
            return sorted(folder.glob("wandb/offline-run-*"))
        return []

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # One that has ended already is told of by the listener.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        data, heard, silent = b"", time.monotonic(), False
        while True:
            if not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
                behind = self._telemetry.path.stat().st_size > self._offset
                if behind and not silent and time.monotonic() - heard > _SILENT_SECONDS:
                    silent = True
                    self._say("sink_delayed", f"it has not answered for {_SILENT_SECONDS:.0f} s")
                continue
            piece = os.read(descriptor, 65536)
            if not piece:
                break
            heard, silent = time.monotonic(), False
            *lines, data = (data + piece).split(b"\n")
            for line in lines:
                self._hear(line)
        code = self._process.wait()
        if not self._ending:
            self._said_failed = True
            self._say("sink_failed", self._problem or f"it ended with {code}")

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # a library's own words
        if not isinstance(message, dict):
            return
        self._offset = message.get("offset", self._offset)
        self.step = message.get("step", self.step)
        if "problem" in message:
            self._problem = str(message["problem"])
            if not message.get("final"):
                self._say("sink_delayed", self._problem)
        elif "lost" in message:
            text = f"{message['lost']} bytes of records were let go before it had sent them"
            self._say("sink_lost", text)
        elif "damaged" in message:
            text = f"{message['damaged']} bytes of telemetry.jsonl are no records, and are not sent"
            self._say("sink_lost", text)
        elif message.get("recovered"):
            self._problem = None
            self._say("sink_recovered", "it goes on")

    def _say(self, kind: str, problem: str) -> None:
        text = f"telemetry to {self.kind}: {problem}"
        if kind in ("sink_delayed", "sink_failed"):
            text += "; the training goes on, and telemetry.jsonl keeps what is unsent"
        # The training may have ended meanwhile.
        with contextlib.suppress(ValueError):
            self._telemetry.event(kind, text, {"sink": self.kind, "problem": problem})


def _environment() -> dict[str, str]:
    """This process's, in which the same fp8core is found, and nothing begins on a GPU."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
