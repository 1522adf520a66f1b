"""The whole service as a person runs it, and what tests ask of it.

Real Postgres, Valkey, Celery, supervisors and trainers; only durations that exist to be patient are
shortened through their settings.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from octrain.client import Client, Job
from octrain.local.leftovers import processes_of
from octrain.local.processes import is_alive
from octrain.local.stack import LocalStack

STEP_SECONDS = 120.0


class Service:
    """A running stack, a client of it, and what the tests ask of both."""

    def __init__(self, stack: LocalStack, root: Path) -> None:
        self.stack = stack
        self.root = root
        self.client = Client(stack.url, stack.api_key)
        self.http = httpx.Client(
            base_url=stack.url,
            headers={"Authorization": f"Bearer {stack.api_key}"},
            timeout=30.0,
            trust_env=False,
        )

    def close(self) -> None:
        self.client.close()
        self.http.close()

    def until(self, condition: Callable[[], Any], what: str, seconds: float = STEP_SECONDS) -> Any:
        """What ``condition`` answers as soon as it is true; asked again and again till then, less
        often the longer it takes: the processors are what it waits for, too.
        """
        deadline = time.monotonic() + seconds
        pause = 0.02
        while not (answer := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds:g} s: {what}\n{self.tails()}")
            time.sleep(pause)
            pause = min(0.1, pause * 1.15)
        return answer

    def tails(self) -> str:
        logs = [*self.stack.logs.glob("*.log"), *self.stack.data_dir.glob("workers/*/*.log")]
        texts = [f"--- {log.name}\n" + "\n".join(_last_lines(log, 8)) for log in sorted(logs)]
        return "\n".join(texts)

    def spec(self, name: str = "tiny", **changes: Any) -> dict[str, Any]:
        """``tiny_spec`` of these arguments."""
        return tiny_spec(name, **changes)

    def submit(self, name: str = "tiny", **changes: Any) -> Job:
        return self.client.jobs.create(self.spec(name, **changes))

    def object(self, job_id: str) -> dict[str, Any]:
        """The job as the server tells it."""
        answer = self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, job_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            answer = self.http.get(
                f"/v1/jobs/{job_id}/events", params={"after": after, "limit": 100}
            )
            items = answer.raise_for_status().json()["items"]
            found += items
            if not items:
                return found
            after = items[-1]["seq"]

    def step(self, job: Job, step: int) -> None:
        """Wait until the job has trained so many steps."""
        self.until(
            lambda: job.refresh().data.progress.step >= step or job.is_final,
            f"{job!r} reaches step {step}",
        )
        assert not job.is_final, (job.status, job.data.reason, job.data.detail)

    def end(self, job: Job, status: str = "succeeded", seconds: float = STEP_SECONDS) -> Job:
        self.until(lambda: job.refresh().is_final, f"{job!r} ends", seconds)
        assert job.status == status, (job.data.reason, job.data.detail, self.tails())
        return job

    def attempt_folder(self, job: Job, worker: str = "local") -> Path:
        """The folder of the job's current attempt on its node."""
        attempt = job.refresh().data.attempts[-1]
        return self.stack.worker_data_dir(worker) / "attempts" / attempt.id

    def supervisor(self, job: Job, worker: str = "local") -> int:
        record = self.attempt_folder(job, worker) / "supervisor.json"
        return int(json.loads(record.read_text())["pid"])

    def trainer(self, job: Job, worker: str = "local") -> int:
        """The process id of the job's trainer: the child of its supervisor."""
        supervisor = self.supervisor(job, worker)
        found = [pid for pid in children(supervisor) if is_alive(pid)]
        assert len(found) == 1, found
        return found[0]

    def child(self, words: str) -> int:
        """The one process of the stack whose command line holds these words."""
        found = [pid for pid in processes_of(self.stack.data_dir) if words in command_line(pid)]
        assert len(found) == 1, (words, found)
        return found[0]

    def local_step(self, job: Job, worker: str = "local") -> int:
        """The step that the trainer wrote last to its own disk, whoever else knows of it."""
        path = self.attempt_folder_known(job, worker) / "work" / "telemetry.jsonl"
        step = 0
        for line in _last_lines(path, 40):
            try:
                step = max(step, int(json.loads(line).get("step") or 0))
            except ValueError:
                continue
        return step

    def attempt_folder_known(self, job: Job, worker: str = "local") -> Path:
        """The same as ``attempt_folder``, from what is known already: the API may be away."""
        attempt = job.data.attempts[-1]
        return self.stack.worker_data_dir(worker) / "attempts" / attempt.id

    def is_warm(self, worker: str = "local") -> bool:
        """Whether the node is live and its spare trainer has imported all it needs and waits."""
        live = any(node.name == worker and node.live for node in self.client.nodes())
        spares = [
            pid
            for pid in processes_of(self.stack.data_dir)
            if command_line(pid).endswith("fp8core spare")
            and Path(f"/proc/{pid}/wchan").exists()
            and is_idle(pid)
        ]
        return live and bool(spares)


def tiny_spec(name: str = "tiny", **changes: Any) -> dict[str, Any]:
    """A Llama of one layer on bytes: a few milliseconds a step. ``changes`` replace parts, or
    are merged into the mappings ``training``, ``limits``, ``checkpoint`` and ``evaluation``.
    """
    base: dict[str, Any] = {
        "name": name,
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "vocab_size": 272,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "bos_token_id": None,
                "eos_token_id": None,
            },
        },
        "data": {"source": "text", "path": "corpus.txt"},
        "recipe": {"engine": "emulated", "fp8_format": "HYBRID", "amax_history_len": 4},
        "training": {"steps": 10, "batch_size": 1, "sequence_length": 32},
        "evaluation": {"fraction": 0.1, "max_batches": 1, "every_steps": 0},
        "checkpoint": {"every_steps": 0, "keep_last": 1},
        "limits": {"cancel_deadline_seconds": 20},
    }
    for key, value in changes.items():
        if key in ("training", "evaluation", "checkpoint", "limits"):
            base[key] = {**base[key], **value}
        else:
            base[key] = value
    return base


def children(parent: int) -> list[int]:
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def is_idle(pid: int) -> bool:
    """Whether the process has used at least a second of processor time, and none for 0.3 s."""
    before = cpu_ticks(pid)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if cpu_ticks(pid) != before:
            return False
        time.sleep(0.05)
    return before >= os.sysconf("SC_CLK_TCK")


def _last_lines(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def corpus(folder: Path) -> Path:
    """A root with a little text to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"line {number} of a text that says {number * 7 % 13} again" for number in range(400)]
    (folder / "corpus.txt").write_text("\n".join(words))
    return folder
