"""What must never be, read from the database: one room for all that the state machine looks at."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from octrain_api.jobs.transitions import FINAL, PLACED, TABLE

__all__ = ["Claimed", "Promises"]

FIRST = {("None", "queued"), ("None", "draft")}
EDGES = {(str(a), str(b)) for a, b, _ in TABLE} | FIRST
# What a lease may be over sooner by the service's count than by its holder's: none of it but what
# the calls of this test take.
PRECISION = 5.0


@dataclass
class Claimed:
    """A supervisor, alive or not: what it got when it claimed, and what it has sent."""

    attempt_id: str
    job_id: str
    attempt: int
    node: str
    token: int
    # The lease that it holds, and until when by its own clock.
    lease_number: int
    lease_ends: float
    seq: int = 0
    points: int = 0

    def take_lease(self, asked_at: float, answer: dict[str, Any]) -> None:
        """The answer to what was asked then."""
        self.lease_number = answer["lease_number"]
        self.lease_ends = asked_at + answer["lease_seconds"]


class Promises:
    """What holds after every call. The lists and the set are the machine's own, which grow."""

    def __init__(
        self, world: Any, jobs: list[str], unwanted: set[str], claims: list[Claimed]
    ) -> None:
        self._world = world
        self._jobs = jobs
        self._unwanted = unwanted
        self._claims = claims
        self._finals: dict[str, tuple[Any, ...]] = {}
        self._versions: dict[str, int] = {}
        self._ended: dict[str, tuple[Any, ...]] = {}
        self._recorded: dict[str, set[str]] = {}

    async def check(self) -> None:
        sql = self._world.service.sql
        jobs = {row.id: row for row in await sql("SELECT * FROM jobs")}
        attempts = await sql("SELECT * FROM attempts ORDER BY job_id, number")
        messages = {row.attempt_id for row in await sql("SELECT attempt_id FROM outbox")}
        events = await sql("SELECT job_id, seq, kind, data FROM events ORDER BY job_id, seq")
        assert set(self._jobs) == set(jobs)
        live = Counter(row.job_id for row in attempts if row.status != "ended")
        assert messages == {row.id for row in attempts if row.status == "placed"}
        for job in jobs.values():
            self._check_job(job, live[job.id], [e for e in events if e.job_id == job.id])
        for job_id, of_job in itertools.groupby(attempts, key=lambda row: row.job_id):
            rows = list(of_job)
            assert [row.number for row in rows] == list(range(1, jobs[job_id].attempt + 1))
            tokens = [row.fencing_token for row in rows]
            assert tokens == sorted(set(tokens)), "a later attempt has the larger token"
        artifacts = await sql("SELECT id, attempt_id FROM artifacts")
        for row in attempts:
            if row.status == "ended":
                self._check_ended(row, {a.id for a in artifacts if a.attempt_id == row.id})
        self._check_slots([row for row in attempts if row.status != "ended"])

    def _check_ended(self, row: Any, artifacts: set[str]) -> None:
        end = (row.outcome, row.reason, row.detail, row.step, row.phase, row.acknowledged_seq)
        assert self._ended.setdefault(row.id, end) == end, "a stale supervisor has written"
        # Later checkpoints take the place of older ones, of ended attempts too.
        assert artifacts <= self._recorded.setdefault(row.id, artifacts), "or has recorded one"
        self._recorded[row.id] = artifacts
        if row.reason == "worker_lost" and row.finish_report is None:
            for claim in self._claims:
                if claim.attempt_id == row.id:
                    left = claim.lease_ends - self._world.now
                    assert left < PRECISION, "its place is free, and its trainer may run"

    def _check_job(self, job: Any, live: int, events: list[Any]) -> None:
        story = [(str(e.data["from"]), str(e.data["to"])) for e in events if e.kind == "status"]
        assert story[0] in FIRST, story
        assert all(a[1] == b[0] for a, b in itertools.pairwise(story)), story
        assert story[-1][1] == job.status, (story, job.status)
        assert set(story) <= EDGES, set(story) - EDGES
        assert len({e.seq for e in events}) == len(events)
        assert events[-1].seq <= job.sequence
        assert live == (job.status in PLACED), (job.status, live)
        if job.deleted_at is not None:
            assert job.id in self._unwanted
            assert job.status in (*FINAL, "draft")
            assert (job.spec, job.latest_metrics) == ({}, {})
            assert events[-1].kind == "deleted", "nothing happens to it any more"
            return
        assert job.restarts <= job.spec["limits"]["max_restarts"]
        assert (job.stop_deadline_at is not None) == (job.status in ("pausing", "cancelling"))
        assert job.status == "queued" or job.next_attempt_at is None
        assert (job.queue_deadline_at is not None) == (
            job.status == "queued" and job.spec["limits"]["max_queue_time_seconds"] is not None
        )
        assert (job.ended_at is not None) == (job.status in FINAL)
        assert self._versions.get(job.id, 0) <= job.version
        self._versions[job.id] = job.version
        if job.status in FINAL:
            assert job.reason, job.status
            end = (job.status, job.reason, job.detail, job.attempt, len(story))
            assert self._finals.setdefault(job.id, end) == end, "an end is for ever"
        assert job.id not in self._finals or job.status in FINAL

    def _check_slots(self, live: list[Any]) -> None:
        names = {node_id: name for name, node_id in self._world.ids.items()}
        cpu = Counter(names[row.node_id] for row in live if row.device == "cpu")
        gpus = Counter((row.node_id, index) for row in live for index in row.gpu_indices)
        assert all(count <= self._world.nodes[name]["cpu_slots"] for name, count in cpu.items()), (
            cpu
        )
        assert all(count == 1 for count in gpus.values()), gpus

    async def check_points(self) -> None:
        sql = self._world.service.sql
        rows = await sql(
            "SELECT job_id, attempt, sum(points) AS points FROM metric_batches GROUP BY 1, 2"
        )
        stored = {(row.job_id, row.attempt): row.points for row in rows}
        sent = Counter[tuple[str, int]]()
        gone = {r.id for r in await sql("SELECT id FROM jobs WHERE deleted_at IS NOT NULL")}
        for claim in self._claims:
            if claim.job_id not in gone:
                sent[claim.job_id, claim.attempt] += claim.points
        assert stored == {key: count for key, count in sent.items() if count}
