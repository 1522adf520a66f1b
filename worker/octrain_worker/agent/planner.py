"""The node's planner: answers what a spec would take, by asking the training library."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from octrain_worker.api_client import ApiClient, ApiRefused, ApiUnavailable, PlanQuestion
from octrain_worker.capabilities import find_gpus
from octrain_worker.roots import allowed_roots
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.environment import trainer_environment

__all__ = ["Planner"]

logger = logging.getLogger(__name__)

# A plan builds the model without weights and runs one step of it on no device.
_PLAN_SECONDS = 150.0
_WAIT_SECONDS = 20.0
_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.3
_MOST_DETAIL = 2000


class Planner:
    """Asks the API for specs and plans them one at a time, in a process of their own."""

    def __init__(self, settings: WorkerSettings, node_id: str, stopping: threading.Event) -> None:
        self._settings = settings
        self._node_id = node_id
        self._stopping = stopping
        self._card = next((gpu.name for gpu in find_gpus()), None)
        # Waiting for a question holds its connection: nothing else of the node may wait behind it.
        self._client = ApiClient(
            settings.api.api_url,
            settings.api.node_key.get_secret_value(),
            timeout=_WAIT_SECONDS + 10,
            ca_file=settings.api.ca_file,
        )

    def run(self) -> None:
        """Answer questions until the node stops."""
        while not self._stopping.is_set():
            try:
                question = self._client.take_plan(self._node_id, wait=_WAIT_SECONDS)
                if question is not None and not self._stopping.is_set():
                    result, problem = self.plan(question)
                    self._client.answer_plan(self._node_id, question.key, result, problem)
            except ApiUnavailable as error:
                logger.debug("no question to plan: %s", error)
                self._stopping.wait(_PAUSE_SECONDS)
            except ApiRefused as error:
                # An API older than this worker has no such questions.
                logger.warning("the planner is refused: %s", error)
                self._stopping.wait(12 * _PAUSE_SECONDS)
            except Exception:  # one odd spec must not keep all others from being planned
                logger.exception("a spec could not be planned")
                self._stopping.wait(_PAUSE_SECONDS)

    def plan(self, question: PlanQuestion) -> tuple[dict[str, Any] | None, str | None]:
        """The plan of the spec, or why there is none, in words for its owner."""
        source = question.spec.get("model", {}).get("source")
        if source == "job":
            return None, "A model of another job is planned once the job is placed."
        with tempfile.TemporaryDirectory(prefix="octrain-plan-") as folder:
            path = Path(folder, "spec.json")
            path.write_text(json.dumps(question.spec), encoding="utf-8")
            command = [*self._settings.trainer.command, "plan", str(path), "--json"]
            roots = allowed_roots(self._settings.storage.roots, question.roots)
            # Without a root the planner would read any path of this machine.
            for root in roots or [folder]:
                command += ["--root", root]
            # The planner's process sees no GPU; figures measured on one are found by its name.
            if self._card is not None:
                command += ["--card", self._card]
            return _run(command, self._environment(), folder, self._stopping)

    def _environment(self) -> dict[str, str]:
        environment = trainer_environment("plan", extra_names=self._settings.trainer.environment)
        # A plan needs no device, and must not take memory of one that a job uses.
        return environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _run(
    command: list[str], environment: dict[str, str], folder: str, stopping: threading.Event
) -> tuple[dict[str, Any] | None, str | None]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    deadline = time.monotonic() + _PLAN_SECONDS
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=_LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if stopping.is_set():
                    return None, "The node shut down while it planned."
                if time.monotonic() > deadline:
                    return None, f"The plan took longer than {_PLAN_SECONDS:.0f} s."
    finally:
        _kill(process)
    if process.returncode != 0:
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        said = " ".join(lines[-3:]) if lines else f"the planner ended with {process.returncode}"
        return None, said[-_MOST_DETAIL:]
    try:
        found = json.loads(output)
    except ValueError:
        return None, "The planner's answer is not JSON."
    return (found, None) if isinstance(found, dict) else (None, "The planner's answer is no plan.")


def _kill(process: subprocess.Popen[str]) -> None:
    """End the planner and whatever it started; it leads a session of its own."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
