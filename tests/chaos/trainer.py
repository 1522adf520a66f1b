"""The trainer of a chaos run: the real one, or one whose every loss depends on all steps before it.

Started as the real one is (``spare``, then one JSON line). The label ``trainer`` of the job says
which of the two takes over, in the same process. Both carry their job and attempt in their
environment, where an onlooker finds them in ``/proc``.

The scripted one imports nothing heavy, so that many run on two cores. Its state is a number that
each step changes by a rule; a step left out, done twice, or done from another checkpoint than the
one before it gives other losses from there on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

JOB = "OCTRAIN_CHAOS_JOB"
ATTEMPT = "OCTRAIN_CHAOS_ATTEMPT"
STOPPED, STORAGE_FULL = 10, 9
_MODULUS = 1 << 64


def next_state(state: int, step: int) -> int:
    """What a step makes of the state."""
    return (state * 6364136223846793005 + 1442695040888963407 + step) % _MODULUS


def loss_of(state: int) -> float:
    return state / _MODULUS


def losses(seed: int, steps: int) -> list[float]:
    """The losses of an undisturbed run, from step 1."""
    state, found = seed, []
    for step in range(1, steps + 1):
        state = next_state(state, step)
        found.append(loss_of(state))
    return found


def take_over(line: str) -> None:
    """Become the trainer that the job asks for."""
    order = json.loads(line)
    folder = Path(order["workdir"]).parent
    record = json.loads((folder / "supervisor.json").read_text())
    labels = json.loads(Path(order["spec_path"]).read_text())["labels"]
    real = labels["trainer"] == "real"
    command = ["-m", "fp8core", "spare"] if real else [__file__, "run"]
    reader, writer = os.pipe()
    os.write(writer, line.encode())
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    environment = {**os.environ, JOB: record["job_id"], ATTEMPT: record["attempt_id"]}
    os.execve(sys.executable, [sys.executable, *command], environment)


class Run:
    """One run of the scripted trainer."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.work = Path(order["workdir"])
        spec = json.loads(Path(order["spec_path"]).read_text())
        self.steps = int(spec["training"]["steps"])
        self.every = int(spec["checkpoint"]["every_steps"])
        self.seconds = float(spec["labels"]["step_seconds"])
        self.state = int(spec["labels"]["seed"])
        self.step = 0
        self.stop = False
        self.sequence = 0
        self.telemetry = (self.work / "telemetry.jsonl").open("a")
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, _number: int, _frame: object) -> None:
        self.stop = True

    def write(self, **record: Any) -> None:
        self.sequence += 1
        line = {"seq": self.sequence, "time": time.time(), **record}
        self.telemetry.write(json.dumps(line) + "\n")
        self.telemetry.flush()

    def resume(self) -> None:
        """Go on from the newest checkpoint in the workdir whose files are those of its manifest."""
        for folder in sorted(self.work.glob("checkpoints/step-*"), reverse=True):
            try:
                manifest = json.loads((folder / "manifest.json").read_bytes())
                data = (folder / "state.json").read_bytes()
                if hashlib.sha256(data).hexdigest() != manifest["files"][0]["sha256"]:
                    continue
                kept = json.loads(data)
            except (OSError, ValueError, KeyError):
                continue
            self.step, self.state = int(kept["step"]), int(kept["state"])
            return

    def save(self, kind: str) -> None:
        folder = self.work / "checkpoints" / f"step-{self.step:08d}"
        if (folder / "manifest.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps({"step": self.step, "state": self.state}).encode()
        digest = hashlib.sha256(data).hexdigest()
        (folder / "state.json").write_bytes(data)
        files = [{"path": "state.json", "size": len(data), "sha256": digest}]
        partial = folder / ".manifest.json"
        partial.write_text(json.dumps({"complete": True, "step": self.step, "files": files}))
        partial.replace(folder / "manifest.json")
        path = f"checkpoints/{folder.name}"
        self.write(type="checkpoint", step=self.step, path=path, kind=kind, best=False, metric=None)

    def result(self, outcome: str, reason: str, code: int) -> int:
        value = {"outcome": outcome, "reason": reason, "detail": "", "step": self.step}
        partial = self.work / ".result.json"
        partial.write_text(json.dumps({**value, "exit_code": code}))
        partial.replace(self.work / "result.json")
        return code

    def train(self) -> int:
        self.resume()
        self.write(type="phase", phase="training")
        while self.step < self.steps:
            time.sleep(self.seconds)
            self.step += 1
            self.state = next_state(self.state, self.step)
            self.write(type="metrics", step=self.step, values={"train/loss": loss_of(self.state)})
            self.write(type="progress", step=self.step, total_steps=self.steps, tokens=self.step)
            if self.stop:
                self.save("stop")
                return self.result("stopped", "stopped_by_request", STOPPED)
            if self.step % self.every == 0:
                self.save("periodic")
        model = self.work / "model"
        model.mkdir(exist_ok=True)
        (model / "state.json").write_text(json.dumps({"state": self.state}))
        self.write(type="artifact", kind="model", path="model", step=self.step)
        return self.result("succeeded", "completed", 0)


def main() -> int:
    line = sys.stdin.readline()
    if not line.strip():
        return 0
    if sys.argv[1:] == ["spare"]:
        take_over(line)
    try:
        return Run(json.loads(line)).train()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return STORAGE_FULL


if __name__ == "__main__":
    sys.exit(main())
