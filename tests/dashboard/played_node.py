"""A node that trains nothing: it takes jobs and reports what a test says, by the worker's protocol.

What it says goes through the API as any node's words do, so that pages can be shown a hundred
thousand steps, or eight GPUs, on a machine that has neither.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from octrain_worker.api_client import ApiClient, Claim

# Records of one request, as a supervisor ships them.
_RECORDS = 2000
_ENGINE = {"ok": True, "reasons": [], "version": None}


@dataclass
class PlayedJob:
    """A job that the node has taken; ``sent`` counts its telemetry records."""

    id: str
    claim: Claim
    sent: int = 0
    step: int = 0


class PlayedNode:
    """A node with H200s by its own word. Jobs of the device `cuda` come to it.

    It must be heard of now and then, or it counts as gone: ``beat`` says that it lives.
    """

    def __init__(self, service: Any, name: str, gpus: int = 8) -> None:
        self.service = service
        stack = service.stack
        key = service.client.create_key(f"node {name}", "local", ["node"], node=name)
        self._api = ApiClient(stack.url, key, timeout=60)
        self._jobs: list[PlayedJob] = []
        described = {
            "name": name,
            "boot_id": "boot-1",
            "hostname": f"{name}.example.com",
            "version": "1.0.0",
            "device_kinds": ["cuda"],
            "cpu_slots": 0,
            "gpus": [
                {
                    "index": index,
                    "name": "NVIDIA H200",
                    "memory_bytes": 150_754_820_096,
                    "compute_capability": "9.0",
                }
                for index in range(gpus)
            ],
            "engines": {"emulated": _ENGINE, "amp": _ENGINE},
            "roots": [str(service.root)],
            "artifact_url": stack.artifact_url,
        }
        self.gpus = gpus
        self.id = self._api.register(described).node_id

    def __enter__(self) -> PlayedNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave no job behind, and give back the place that the node had."""
        for job in list(self._jobs):
            self.finish(job)
        self._api.node_heartbeat(self.id, [], stopping=True)
        self._api.close()

    def take(self, name: str, **changes: Any) -> PlayedJob:
        """Submit a job for the device `cuda`, and claim it when the scheduler has placed it."""
        told = self.service.submit(name, resources={"device": "cuda"}, **changes)
        service = self.service

        def placed() -> str | None:
            self.beat()
            attempts = service.object(told.id)["attempts"]
            return str(attempts[-1]["id"]) if attempts else None

        attempt = service.until(placed, f"{name} is placed on the node")
        claim = self._api.claim(attempt, node_id=self.id, supervisor=f"supervisor-{told.id}")
        job = PlayedJob(told.id, claim)
        self._jobs.append(job)
        self.send(job, [{"type": "phase", "phase": "training", "time": time.time()}])
        return job

    def send(self, job: PlayedJob, records: Sequence[dict[str, Any]]) -> None:
        """Send records, in as many requests as a supervisor would make of them."""
        attempt, token = job.claim.attempt_id, job.claim.fencing_token
        for start in range(0, len(records), _RECORDS):
            part = records[start : start + _RECORDS]
            self._api.telemetry(attempt, token, job.sent + 1, part)
            job.sent += len(part)
            job.step = max([job.step, *(record.get("step") or 0 for record in part)])

    def beat(self) -> None:
        """Say that the node and its jobs live."""
        self._api.node_heartbeat(self.id, [job.claim.attempt_id for job in self._jobs])
        for job in self._jobs:
            attempt, token = job.claim.attempt_id, job.claim.fencing_token
            self._api.heartbeat(attempt, token, phase="training", step=job.step)

    def report_gpus(self, samples: int) -> None:
        """So many samples of the machine and its GPUs, ten seconds apart, up to now."""
        found = []
        for number in range(samples):
            busy = 0.9 + 0.08 * math.sin(number / 5)
            found.append(
                {
                    "id": f"sample-{number:08d}",
                    "age_seconds": 10.0 * (samples - 1 - number),
                    "host": {"cpu_utilization": busy / 3, "memory_bytes": 4.1e11},
                    "gpus": [
                        {
                            "index": index,
                            "utilization": busy - index / 50,
                            "memory_bytes": int(9e10 + 1e9 * index),
                            "power_watts": 560.0 + 10 * index,
                            "temperature_celsius": 60.0 + index,
                        }
                        for index in range(self.gpus)
                    ],
                }
            )
        self._api.node_metrics(self.id, found)

    def convert(self, job: PlayedJob, rows: Sequence[dict[str, str | None]]) -> None:
        """Register the report of what became of each layer, as the job's trainer makes it."""
        store = Path(urlsplit(self.service.stack.artifact_url).path)
        content = json.dumps(rows).encode()
        path = store / job.claim.artifact_prefix / "conversion.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        file = {
            "path": path.name,
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        report = {
            "kind": "conversion",
            "name": "conversion",
            "step": 0,
            "url": path.parent.as_uri(),
            "files": [file],
        }
        self._api.artifact(job.claim.attempt_id, job.claim.fencing_token, report)

    def finish(self, job: PlayedJob) -> None:
        """The job has succeeded."""
        self._jobs.remove(job)
        outcome = {"outcome": "succeeded", "reason": "completed", "step": job.step}
        self._api.finish(job.claim.attempt_id, job.claim.fencing_token, outcome)


def training(
    names: Sequence[str], steps: range, seed: int = 1, began: float | None = None
) -> Iterator[dict[str, Any]]:
    """Records of metrics that fall towards one, with noise: one for each step, 0.1 s apart."""
    chance = random.Random(seed)
    began = time.time() - 0.1 * steps.stop if began is None else began
    for step in steps:
        level = 1 + 9 * math.exp(-step / 20_000)
        yield {
            "type": "metrics",
            "time": began + 0.1 * step,
            "step": step,
            "tokens": 4096 * step,
            "values": {name: level * (0.9 + 0.2 * chance.random()) for name in names},
        }
