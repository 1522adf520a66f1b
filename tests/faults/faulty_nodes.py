"""A service whose nodes can be cut off and frozen, and what its jobs are held to.

The trainer is the scripted one of the chaos runs: each of its losses depends on all steps before
it, so a series that equals an undisturbed one has lost, repeated and mixed up nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from octrain.client import Job
from octrain.local.processes import is_alive
from tests.chaos import trainer as scripted
from tests.chaos.proxy import CuttableProxy
from tests.chaos.watch import trainers

__all__ = [
    "ENVIRONMENT",
    "LEASE",
    "Nodes",
    "exact",
    "series",
    "stops",
    "succeeds",
    "trainers_of",
    "wake",
]

# The shortest lease there is, in seconds; it stands for the hours that a job may ask for.
LEASE = 30
ENVIRONMENT = {
    "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {scripted.__file__}",
    "OCTRAIN_WORKER_CPU_SLOTS": "4",
    "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0.5",
    "OCTRAIN_CONTROLLER_TICK": "0.5",
    "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
    "OCTRAIN_CONTROLLER_HEARTBEAT_TTL": "8",
    "OCTRAIN_CONTROLLER_DOWNTIME_TOLERANCE": "5",
    "OCTRAIN_CONTROLLER_LEASE_MARGIN": "6",
    "OCTRAIN_CONTROLLER_FORCED_LEASE": "5",
    "OCTRAIN_CONTROLLER_RESEND_AFTER": "10",
    "OCTRAIN_SCHEDULER_FAULT_LIMIT": "0",
    # Of jobs of one priority none gives way.
    "OCTRAIN_SCHEDULER_PREEMPTION": "pause",
}


@dataclass
class Nodes:
    """A service, and the network between it and each of its nodes."""

    service: Any
    proxies: dict[str, CuttableProxy]

    def add(self, name: str) -> None:
        """Start a node and wait until it is live."""
        self.proxies[name] = CuttableProxy([self.service.stack.port])
        self.service.stack.start_worker(name, api_url=self.proxies[name].url)
        self.service.until(lambda: self.node(name).get("live"), f"the node {name} is live", 240)

    def node(self, name: str) -> dict[str, Any]:
        nodes = self.service.http.get("/v1/nodes").json()["items"]
        return next((node for node in nodes if node["name"] == name), {})

    def only(self, *names: str) -> None:
        """Let jobs be placed on these nodes alone."""
        for node in self.service.http.get("/v1/nodes").json()["items"]:
            wish = "undrain" if node["name"] in names else "drain"
            answer = self.service.http.post(f"/v1/nodes/{node['id']}/{wish}")
            assert answer.status_code == 200, answer.text

    def submit(self, name: str, *, steps: int = 200, **limits: Any) -> Job:
        made: Job = self.service.client.jobs.create(self.spec(name, steps=steps, **limits))
        return made

    def spec(self, name: str, *, steps: int, **limits: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.service.spec(
            name,
            labels={"trainer": "scripted", "seed": str(len(name)), "step_seconds": "0.02"},
            training={"steps": steps},
            checkpoint={"every_steps": 10, "keep_last": 2},
            limits={
                "lease_ttl_seconds": LEASE,
                "cancel_deadline_seconds": 5,
                "restart_backoff_seconds": 0,
                **limits,
            },
        )
        return made

    def running_on(self, name: str, job_name: str, **limits: Any) -> Job:
        """A job of many steps that has stored a checkpoint, on this node."""
        job = self.submit(job_name, **{"steps": 100_000, **limits})
        self.service.step(job, 25)
        self.service.until(lambda: _kinds_of(job) & {"checkpoint"}, "a checkpoint is stored")
        assert job.refresh().data.attempts[-1].node == name
        return job


def _kinds_of(job: Job) -> set[str]:
    return {artifact.kind for artifact in job.artifacts()}


def exact(job: Job) -> None:
    """The joined series of a job is that of an undisturbed one."""
    points = [point for series in job.metrics("train/loss") for point in series.points]
    steps = [step for step, _ in points]
    assert steps == list(range(1, len(steps) + 1)), "twice, or left out"
    seed = int(job.data.spec["labels"]["seed"])
    assert [value for _, value in points] == scripted.losses(seed, len(steps))


def succeeds(nodes: Nodes, job: Job) -> None:
    nodes.service.end(job)
    exact(job)
    assert (
        sum(len(s.steps) for s in job.metrics("train/loss")) == job.data.spec["training"]["steps"]
    )


def stops(nodes: Nodes, job: Job) -> None:
    job.cancel()
    nodes.service.end(job, "cancelled")
    exact(job)


def trainers_of(nodes: Nodes, job: Job) -> list[int]:
    return [one.pid for one in trainers(nodes.service.stack.data_dir) if one.job == job.id]


def series(nodes: Nodes, job: Job, attempt: int) -> list[dict[str, Any]]:
    answer = nodes.service.http.get(
        f"/v1/jobs/{job.id}/metrics", params={"keys": "train/loss", "attempt": attempt}
    )
    return list(answer.json()["series"])


def wake(pid: int) -> None:
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)
