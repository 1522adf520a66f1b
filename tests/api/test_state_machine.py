"""Random calls of everybody at a real database: what must never be, never is, and all ends.

Users, supervisors (stale ones too), nodes, an administrator, the scheduler, the relay and the
reconciler act in any order, some of them at the same time, while the database's clock jumps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octrain_api.clocks import API, beat
from octrain_api.controller.reconciler import Reconciler
from octrain_api.controller.relay import CelerySender, place_elsewhere, relay
from octrain_api.controller.scheduler import Scheduler
from octrain_api.jobs.transitions import FINAL, PLACED, TABLE
from octrain_api.settings import SchedulerSettings

EDGES = {(str(a), str(b)) for a, b, _ in TABLE} | {("None", "queued")}
NODES: dict[str, dict[str, Any]] = {
    "cpu": {"cpu_slots": 2},
    "private": {"cpu_slots": 1, "private_roots": True},
    "gpu": {
        "cpu_slots": 0,
        "device_kinds": ["cuda"],
        "gpus": [{"index": i, "name": "H200", "memory_bytes": 1} for i in range(2)],
    },
}
RESOURCES = [{"device": "cpu"}, {"device": "cuda", "gpus": 1}, {"device": "cuda", "gpus": 2}]
ENDINGS = [
    ("succeeded", "completed", False),
    ("stopped", "stopped_by_request", True),
    ("stopped", "cancelled_by_user", False),
    ("failed", "trainer_crashed", True),
    ("failed", "worker_lost", True),
    ("failed", "out_of_memory", False),
    ("failed", "data_invalid", True),
    ("failed", "internal_error", False),
]
SETTLED = 60
PICK = st.integers(0, 1000)
WISHES = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "resources": st.sampled_from(RESOURCES),
        "limits": st.sampled_from(
            [
                {"lease_ttl_seconds": 60, "cancel_deadline_seconds": 30},
                {"lease_ttl_seconds": 60, "max_restarts": 0},
                {"max_queue_time_seconds": 40, "restart_backoff_seconds": 30},
                {"max_run_time_seconds": 50, "cancel_deadline_seconds": 10},
                {"stall_timeout_seconds": 25, "on_stall": "restart", "max_restarts": 1},
                {"stall_timeout_seconds": 25, "on_stall": "fail"},
            ]
        ),
    }
)
USER_ACTIONS = st.sampled_from(["cancel", "pause", "resume"])
TICKS = st.sampled_from(["scheduler", "relay", "reconciler", "reconciler without the API"])
NODE_ACTIONS = st.sampled_from(
    ["heartbeat", "register", "reboot", "drain", "drain?release=true", "undrain", "release"]
)
METRIC = {"type": "metrics", "time": 1.0, "values": {"train/loss": 1.0}}
WRITES = st.one_of(
    st.tuples(
        st.just("heartbeat"),
        st.fixed_dictionaries({"step": st.none() | st.integers(0, 50)}),
    ),
    st.integers(1, 3).map(
        lambda n: (
            "telemetry",
            {"records": [METRIC | {"step": i} for i in range(n)]},
        )
    ),
    st.integers(1, 3).map(
        lambda n: (
            "artifacts",
            {
                "kind": "checkpoint",
                "name": f"step-{n}",
                "step": n,
                "files": [{"path": "x", "size": 1, "sha256": "0" * 64}],
            },
        )
    ),
)
FINISHES = st.sampled_from(ENDINGS).map(
    lambda e: (
        "finish",
        {"outcome": e[0], "reason": e[1], "resumable": e[2], "step": 3},
    )
)


@dataclass
class Claimed:
    """A supervisor, alive or not: what it got when it claimed, and what it has sent."""

    attempt_id: str
    job_id: str
    attempt: int
    node: str
    token: int
    seq: int = 0
    points: int = 0


class World:
    """The service on a database of its own, and everybody's keys."""

    def __init__(self, service: Any, loop: asyncio.AbstractEventLoop, redis_url: str) -> None:
        self.service, self.loop = service, loop
        self.sender = CelerySender(service.settings.broker)
        self.run(self._keys())

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _keys(self) -> None:
        service = self.service
        self.user = await service.user("ada")
        self.stranger = await service.user("eve")
        self.node = service.client(await service.key("operations", "node"))
        self.admin = service.client(await service.key("root", "admin"))

    async def reset(self) -> None:
        await self.service.sql("TRUNCATE jobs, nodes, outbox, queue_groups, service_clocks CASCADE")
        settings = self.service.settings
        self.scheduler = Scheduler(
            self.service.database,
            settings.controller,
            SchedulerSettings(preemption="pause", batch=3, reserve_after=30, fault_limit=2),
        )
        self.reconciler = Reconciler(self.service.database, settings)
        self.ids: dict[str, str] = {}
        self.boots = Counter[str]()
        for name in NODES:
            await self.register(name)

    async def register(self, name: str) -> httpx.Response:
        engine = {"ok": True, "reasons": [], "version": None}
        answer = await self.node.post(
            "/nodes/register",
            json={
                "name": name,
                "boot_id": f"boot-{self.boots[name]}",
                "hostname": name,
                "version": "0.1.0",
                "device_kinds": ["cpu"],
                "gpus": [],
                "engines": {"emulated": engine},
                "artifact_url": self.service.settings.storage.artifact_url,
            }
            | NODES[name],
        )
        assert answer.status_code == 200, answer.text
        self.ids[name] = answer.json()["node_id"]
        return answer

    async def reconcile(self, api_alive: bool) -> None:
        if api_alive:
            async with self.service.database.transaction() as session:
                tolerance = self.service.settings.controller.downtime_tolerance
                await beat(session, API, tolerance)
        await self.reconciler.tick()

    async def relay(self) -> None:
        controller = self.service.settings.controller
        await relay(self.service.database, controller, self.sender)
        await place_elsewhere(self.service.database, controller)


def machine(world: World, spec: dict[str, Any]) -> type[RuleBasedStateMachine]:
    """The machine over this world."""

    class Service(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.jobs: list[str] = []
            self.finals: dict[str, tuple[Any, ...]] = {}
            self.versions: dict[str, int] = {}
            self.claims: list[Claimed] = []
            self.nonces = itertools.count()

        def run(self, *works: Awaitable[Any]) -> Any:
            return world.run(self._gather(works))

        async def _gather(self, works: tuple[Awaitable[Any], ...]) -> list[Any]:
            return list(await asyncio.gather(*works))

        @initialize()
        def begin(self) -> None:
            world.run(world.reset())

        # --- what they do; each can happen beside another ------------------------------------

        async def _post(self, wish: dict[str, Any]) -> None:
            answer = await world.user.post("/jobs", json=spec | wish)
            assert answer.status_code == 201, answer.text
            self.jobs.append(answer.json()["id"])

        async def _wish(self, index: int, action: str, *, stranger: bool = False) -> None:
            if not self.jobs:
                return
            client = world.stranger if stranger else world.user
            answer = await client.post(f"/jobs/{self.jobs[index % len(self.jobs)]}/{action}")
            assert answer.status_code in ((404,) if stranger else (200, 409)), answer.text

        async def _claim(self, index: int, right_node: bool) -> None:
            rows = await world.service.sql(
                "SELECT a.id, n.name FROM attempts a JOIN nodes n ON n.id = a.node_id "
                "ORDER BY a.status = 'placed' DESC, a.id LIMIT 4"
            )
            if not rows:
                return
            row = rows[index % len(rows)]
            node = row.name if right_node else next(n for n in NODES if n != row.name)
            nonce = f"supervisor-{next(self.nonces)}"
            body = {"node_id": world.ids[node], "supervisor": nonce}
            answer = await world.node.post(f"/attempts/{row.id}/claim", json=body)
            assert answer.status_code in (200, 409), answer.text
            assert answer.status_code == 409 or right_node
            if answer.status_code == 200:
                got = answer.json()
                self.claims.append(
                    Claimed(row.id, got["job_id"], got["attempt"], node, got["fencing_token"])
                )
                again = await world.node.post(f"/attempts/{row.id}/claim", json=body)
                assert again.status_code in (200, 409), again.text

        def _one(self, index: int) -> Claimed | None:
            # Mostly the newest: the old ones are stale for ever.
            return self.claims[-1 - index % len(self.claims)] if self.claims else None

        async def _write(self, index: int, action: str, body: dict[str, Any]) -> None:
            claim = self._one(index)
            if claim is None:
                return
            if action == "telemetry":
                body = {"first_seq": claim.seq + 1} | body
            if action == "artifacts":
                store = world.service.settings.storage.artifact_url
                prefix = f"jobs/{claim.job_id}/attempts/{claim.attempt}"
                body = body | {"url": f"{store}/{prefix}/checkpoints/{body['name']}"}
            url = f"/attempts/{claim.attempt_id}/{action}"
            wrong = await world.node.post(url, json={"fencing_token": claim.token + 1} | body)
            assert wrong.status_code == 409, wrong.text
            answer = await world.node.post(url, json={"fencing_token": claim.token} | body)
            assert answer.status_code in (200, 409), answer.text
            if action == "telemetry" and answer.status_code == 200:
                reached = answer.json()["acknowledged_seq"]
                claim.points += reached - claim.seq
                claim.seq = reached

        async def _tick(self, who: str) -> None:
            if who == "scheduler":
                await world.scheduler.tick()
            elif who == "relay":
                await world.relay()
            else:
                await world.reconcile(who == "reconciler")

        async def _node(self, name: str, action: str) -> None:
            node_id = world.ids[name]
            if action == "heartbeat":
                answer = await world.node.post(f"/nodes/{node_id}/heartbeat", json={})
            elif action in ("register", "reboot"):
                world.boots[name] += action == "reboot"
                answer = await world.register(name)
            else:
                answer = await world.admin.post(f"/nodes/{node_id}/{action}")
            assert answer.status_code == 200, answer.text

        # --- in which order -------------------------------------------------------------------

        @rule(wish=WISHES)
        def a_user_posts(self, wish: dict[str, Any]) -> None:
            self.run(self._post(wish))

        @precondition(lambda self: self.jobs)
        @rule(index=PICK, action=USER_ACTIONS, stranger=st.integers(0, 9).map(lambda n: n == 9))
        def a_user_acts(self, index: int, action: str, stranger: bool) -> None:
            self.run(self._wish(index, action, stranger=stranger))

        @rule()
        def a_job_is_placed_and_taken(self) -> None:
            self.run(self._tick("scheduler"))
            self.run(self._claim(0, True))

        @rule(index=PICK, right=st.integers(0, 5).map(bool))
        def a_supervisor_claims(self, index: int, right: bool) -> None:
            self.run(self._claim(index, right))

        @precondition(lambda self: self.claims)
        @rule(index=PICK, write=st.one_of(WRITES, FINISHES))
        def a_supervisor_writes(self, index: int, write: tuple[str, dict[str, Any]]) -> None:
            self.run(self._write(index, *write))

        @rule(who=TICKS)
        def the_controller_ticks(self, who: str) -> None:
            self.run(self._tick(who))

        @rule(name=st.sampled_from(sorted(NODES)), action=NODE_ACTIONS)
        def a_node_or_its_administrator_acts(self, name: str, action: str) -> None:
            self.run(self._node(name, action))

        @rule(seconds=st.sampled_from([2, 8, 28, 45, 100, 1000]), away=st.booleans())
        def time_passes(self, seconds: float, away: bool) -> None:
            self.run(world.service.advance(seconds, service_away=away))
            if not away:
                self.run(*(self._node(name, "heartbeat") for name in NODES))

        @precondition(lambda self: self.jobs)
        @rule(index=PICK, action=USER_ACTIONS, write=st.one_of(WRITES, FINISHES), who=TICKS)
        def all_at_once(
            self, index: int, action: str, write: tuple[str, dict[str, Any]], who: str
        ) -> None:
            self.run(
                self._wish(index, action),
                self._write(index, *write),
                self._tick(who),
                self._claim(index, True),
            )

        @precondition(lambda self: self.jobs)
        @rule()
        def two_controllers_and_two_supervisors(self) -> None:
            self.run(*(self._tick("scheduler") for _ in range(2)))
            self.run(*(self._claim(0, True) for _ in range(2)))

        # --- what never is --------------------------------------------------------------------

        @invariant()
        def holds(self) -> None:
            world.run(self._check())

        async def _check(self) -> None:
            sql = world.service.sql
            jobs = {row.id: row for row in await sql("SELECT * FROM jobs")}
            attempts = await sql("SELECT * FROM attempts ORDER BY job_id, number")
            messages = {row.attempt_id for row in await sql("SELECT attempt_id FROM outbox")}
            events = await sql("SELECT job_id, seq, kind, data FROM events ORDER BY job_id, seq")
            assert set(self.jobs) == set(jobs)
            live = Counter(row.job_id for row in attempts if row.status != "ended")
            assert messages == {row.id for row in attempts if row.status == "placed"}
            for job in jobs.values():
                self._check_job(job, live[job.id], [e for e in events if e.job_id == job.id])
            for job_id, of_job in itertools.groupby(attempts, key=lambda row: row.job_id):
                rows = list(of_job)
                assert [row.number for row in rows] == list(range(1, jobs[job_id].attempt + 1))
                tokens = [row.fencing_token for row in rows]
                assert tokens == sorted(set(tokens)), "a later attempt has the larger token"
            self._check_slots([row for row in attempts if row.status != "ended"])

        def _check_job(self, job: Any, live: int, events: list[Any]) -> None:
            story = [(str(e.data["from"]), str(e.data["to"])) for e in events if e.kind == "status"]
            assert story[0] == ("None", "queued"), story
            assert all(a[1] == b[0] for a, b in itertools.pairwise(story)), story
            assert story[-1][1] == job.status, (story, job.status)
            assert set(story) <= EDGES, set(story) - EDGES
            assert len({e.seq for e in events}) == len(events)
            assert events[-1].seq <= job.sequence
            assert live == (job.status in PLACED), (job.status, live)
            assert job.restarts <= job.spec["limits"]["max_restarts"]
            assert (job.stop_deadline_at is not None) == (job.status in ("pausing", "cancelling"))
            assert job.status == "queued" or job.next_attempt_at is None
            assert (job.queue_deadline_at is not None) == (
                job.status == "queued" and job.spec["limits"]["max_queue_time_seconds"] is not None
            )
            assert (job.ended_at is not None) == (job.status in FINAL)
            assert self.versions.get(job.id, 0) <= job.version
            self.versions[job.id] = job.version
            if job.status in FINAL:
                assert job.reason, job.status
                end = (job.status, job.reason, job.detail, job.attempt, len(story))
                assert self.finals.setdefault(job.id, end) == end, "an end is for ever"
            assert job.id not in self.finals or job.status in FINAL

        def _check_slots(self, live: list[Any]) -> None:
            names = {node_id: name for name, node_id in world.ids.items()}
            cpu = Counter(names[row.node_id] for row in live if row.device == "cpu")
            gpus = Counter((row.node_id, index) for row in live for index in row.gpu_indices)
            assert all(count <= NODES[name]["cpu_slots"] for name, count in cpu.items()), cpu
            assert all(count == 1 for count in gpus.values()), gpus

        # --- and all comes to an end ----------------------------------------------------------

        def teardown(self) -> None:
            if self.jobs:
                world.run(self._settle())

        async def _settle(self) -> None:
            """With every node well again, each job that is not over runs to its end."""
            for name in NODES:
                await self._node(name, "undrain")
                await self._node(name, "release")
            for job_id in self.jobs:
                await world.user.post(f"/jobs/{job_id}/resume")
            for _ in range(SETTLED):
                open_jobs = await world.service.sql(
                    "SELECT id FROM jobs WHERE status NOT IN ('succeeded', 'failed', 'cancelled')"
                )
                if not open_jobs:
                    break
                await self._round()
                await self._check()
            else:
                rows = await world.service.sql(
                    "SELECT id, status, need, waiting_for FROM jobs LEFT JOIN queue_groups "
                    "USING (need) WHERE ended_at IS NULL"
                )
                raise AssertionError(f"nobody will ever pick these: {rows}")
            assert not await world.service.sql("SELECT 1 FROM outbox")
            await self._tick("scheduler")
            assert not await world.service.sql("SELECT 1 FROM queue_groups")
            await self._check_points()

        async def _round(self) -> None:
            await world.service.advance(20)
            for name in NODES:
                await self._node(name, "heartbeat")
            await world.scheduler.run()
            await world.relay()
            placed = await world.service.sql("SELECT 1 FROM attempts WHERE status = 'placed'")
            for _ in placed:
                await self._claim(0, True)
            for claim in self.claims:
                await world.node.post(
                    f"/attempts/{claim.attempt_id}/finish",
                    json={
                        "fencing_token": claim.token,
                        "outcome": "succeeded",
                        "reason": "completed",
                    },
                )
            await world.reconcile(api_alive=True)
            for job_id in self.jobs:
                await world.user.post(f"/jobs/{job_id}/resume")

        async def _check_points(self) -> None:
            rows = await world.service.sql(
                "SELECT s.job_id, s.attempt, sum(cardinality(c.steps)) AS points "
                "FROM metric_series s JOIN metric_chunks c ON c.series_id = s.id GROUP BY 1, 2"
            )
            stored = {(row.job_id, row.attempt): row.points for row in rows}
            sent = Counter[tuple[str, int]]()
            for claim in self.claims:
                sent[claim.job_id, claim.attempt] += claim.points
            assert stored == {key: count for key, count in sent.items() if count}

    return Service


@pytest.fixture
def world(copied_url: str, redis_url: str, tmp_path: Path, make_service: Any) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    running = make_service(copied_url, redis_url, tmp_path)
    service = loop.run_until_complete(anext(running))
    made = World(service, loop, redis_url)
    yield made
    made.sender.close()
    loop.run_until_complete(running.aclose())
    loop.close()


PROFILE: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def test_the_service_keeps_its_promises(world: World, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(
            max_examples=12, stateful_step_count=25, derandomize=True, print_blob=True, **PROFILE
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_service_keeps_its_promises_for_long(world: World, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(max_examples=150, stateful_step_count=60, print_blob=True, **PROFILE),
    )
