"""Attempts that send packed telemetry, made without a scheduler, and what was sent to them."""

from __future__ import annotations

import math
import struct
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from octrain_api.metrics import compaction
from octrain_api.metrics.repository import MetricRepository
from octrain_worker.supervisor.packing import CONTENT_TYPE, pack

SPELT = {math.inf: "Infinity", -math.inf: "-Infinity"}
READ = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NODE = {
    "name": "node-m",
    "boot_id": "b",
    "hostname": "h",
    "version": "1",
    "device_kinds": ["cpu"],
    "cpu_slots": 9,
    "gpus": [],
    "engines": {},
}
_JOB = (
    "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, attempt) "
    "VALUES (:job, 'ada', '{}', '', 0, '{}', 'running', 'cpu', 0)"
)
_END = "UPDATE attempts SET status = 'ended', ended_at = now() WHERE job_id = :job"
_ATTEMPT = (
    "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
    "gpu_indices, lease_seconds, claimed_at) "
    "VALUES (:attempt, :job, :number, :node, 'running', 7, 'cpu', '{}', 900, now())"
)


def spelt(value: float) -> float | str:
    """A number as JSON has it."""
    return "NaN" if math.isnan(value) else SPELT.get(value, value)


def number(value: Any) -> float:
    """The inverse."""
    return READ[value] if isinstance(value, str) else float(value)


def same(a: float, b: float) -> bool:
    """Bit for bit, but that one NaN is like another."""
    return (math.isnan(a) and math.isnan(b)) or struct.pack("<d", a) == struct.pack("<d", b)


@dataclass
class MetricJob:
    """A job, its node's and its owner's clients, and the points that it has recorded."""

    service: Any
    node: httpx.AsyncClient
    user: httpx.AsyncClient
    id: str = field(default_factory=lambda: f"job_{uuid.uuid4().hex}")
    node_id: str = ""
    attempt: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    # (name, attempt) -> (step, value, time, tokens) in the order of recording
    points: defaultdict[tuple[str, int], list[tuple[int, float, float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    async def create(self) -> None:
        answer = await self.node.post("/nodes/register", json=_NODE)
        assert answer.status_code == 200, answer.text
        self.node_id = answer.json()["node_id"]
        await self.service.sql(_JOB, job=self.id)
        await self.restart()

    async def restart(self) -> None:
        """A new attempt in place of the one there was."""
        await self.service.sql(_END, job=self.id)
        self.attempt += 1
        self.records = []
        await self.service.sql(
            _ATTEMPT,
            job=self.id,
            attempt=self.attempt_id,
            number=self.attempt,
            node=self.node_id,
        )

    @property
    def attempt_id(self) -> str:
        return f"att_{self.id}_{self.attempt}"

    async def send(self, *records: dict[str, Any], overlap: int = 0) -> None:
        """Send records, after up to `overlap` of those sent before."""
        first = max(len(self.records) - overlap, 0)
        self.records += records
        for record in records:
            for name, value in record["values"].items():
                point = (record["step"], value, record["time"], record["tokens"])
                self.points[name, self.attempt].append(point)
        answer = await self.post(first + 1, self.records[first:])
        assert answer.status_code == 200, answer.text
        assert answer.json()["acknowledged_seq"] == len(self.records)

    async def post(self, first: int, records: list[dict[str, Any]]) -> httpx.Response:
        out = [
            {**r, "values": {n: spelt(v) for n, v in r["values"].items()}} if "values" in r else r
            for r in records
        ]
        return await self.node.post(
            f"/attempts/{self.attempt_id}/telemetry",
            content=pack(7, first, out),
            headers={"Content-Type": CONTENT_TYPE},
        )

    async def compact(self) -> None:
        """Every merge that there is to make."""
        while await compaction.Compactor(self.service.database).tick():
            pass

    async def get(self, path: str = "/metrics", **query: Any) -> Any:
        answer = await self.user.get(f"/jobs/{self.id}{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def batches(self, after: int, until: int) -> list[Any]:
        """What a stream reads of the batches numbered in (after, until]."""
        async with self.service.database.session() as session:
            return await MetricRepository(session).batches_after(self.id, after, until)

    def joined(self) -> dict[tuple[str, int], list[tuple[int, float, float, int]]]:
        """What readers see: what a newer attempt has begun to repeat is the newer one's."""
        seen = {}
        first: dict[str, float] = {}
        for name, attempt in sorted(self.points, key=lambda key: -key[1]):
            points = self.points[name, attempt]
            cut = first.get(name, math.inf)
            kept = sorted((p for p in points if p[0] < cut), key=lambda p: p[0])
            first[name] = min(cut, *(p[0] for p in points))
            if kept:
                seen[name, attempt] = kept
        return seen


def metric(step: int, values: dict[str, float], time: float = 1.5, tokens: int = 8) -> Any:
    return {"type": "metrics", "step": step, "time": time, "tokens": tokens, "values": values}


@pytest.fixture
async def job(lone_service: Any) -> MetricJob:
    """A running job on the database of this test alone."""
    node = lone_service.client(await lone_service.key("operations", "node"))
    job = MetricJob(lone_service, node, await lone_service.user("ada"))
    await job.create()
    return job


class Helpers:
    """Functions that the tests of this folder share."""

    metric = staticmethod(metric)
    same = staticmethod(same)
    number = staticmethod(number)
    pack = staticmethod(pack)


@pytest.fixture(scope="session")
def helpers() -> type[Helpers]:
    return Helpers


@pytest.fixture(scope="session")
def job_class() -> type[MetricJob]:
    return MetricJob
