"""Random calls of everybody at a real database: what must never be, never is, and all ends.

Users, supervisors (stale ones too), nodes, an administrator, the scheduler, the relay and the
reconciler act in any order, some of them at the same time, while the database's clock jumps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

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

from octrain_api.jobs.transitions import FINAL, PLACED, TABLE

EDGES = {(str(a), str(b)) for a, b, _ in TABLE} | {("None", "queued")}
SETTLED = 60


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


def machine(world: Any, spec: dict[str, Any]) -> type[RuleBasedStateMachine]:
    """The machine over this world."""
    calls = world.calls

    class Service(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.jobs: list[str] = []
            self.finals: dict[str, tuple[Any, ...]] = {}
            self.versions: dict[str, int] = {}
            self.ended: dict[str, tuple[Any, ...]] = {}
            self.recorded: dict[str, set[str]] = {}
            self.claims: list[Claimed] = []
            self.nonces = itertools.count()

        def run(self, *works: Awaitable[Any]) -> Any:
            return world.run(self._gather(works))

        async def _gather(self, works: tuple[Awaitable[Any], ...]) -> list[Any]:
            return list(await asyncio.gather(*works))

        @initialize(wishes=st.lists(calls.wishes, min_size=1, max_size=4))
        def begin(self, wishes: list[dict[str, Any]]) -> None:
            world.run(world.reset())
            for wish in wishes:
                self.run(self._post(wish))

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
            node = row.name if right_node else next(n for n in world.nodes if n != row.name)
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
            stale = await world.service.sql(
                "SELECT 1 FROM attempts WHERE id = :id AND status = 'ended'", id=claim.attempt_id
            )
            answer = await world.node.post(url, json={"fencing_token": claim.token} | body)
            # Who has ended the attempt may say so again, in the same words.
            fenced = stale and action != "finish"
            assert answer.status_code in ((409,) if fenced else (200, 409)), answer.text
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

        @rule(wish=calls.wishes)
        def a_user_posts(self, wish: dict[str, Any]) -> None:
            self.run(self._post(wish))

        @precondition(lambda self: self.jobs)
        @rule(
            index=calls.pick,
            action=calls.user_actions,
            stranger=st.integers(0, 9).map(lambda n: n == 9),
        )
        def a_user_acts(self, index: int, action: str, stranger: bool) -> None:
            self.run(self._wish(index, action, stranger=stranger))

        @rule()
        def a_job_is_placed_and_taken(self) -> None:
            self.run(self._tick("scheduler"))
            self.run(self._claim(0, True))

        @rule(index=calls.pick, right=st.integers(0, 5).map(bool))
        def a_supervisor_claims(self, index: int, right: bool) -> None:
            self.run(self._claim(index, right))

        @precondition(lambda self: self.claims)
        @rule(index=calls.pick, write=st.one_of(calls.writes, calls.finishes))
        def a_supervisor_writes(self, index: int, write: tuple[str, dict[str, Any]]) -> None:
            self.run(self._write(index, *write))

        @rule(who=calls.ticks)
        def the_controller_ticks(self, who: str) -> None:
            self.run(self._tick(who))

        @rule(name=st.sampled_from(sorted(world.nodes)), action=calls.node_actions)
        def a_node_or_its_administrator_acts(self, name: str, action: str) -> None:
            self.run(self._node(name, action))

        @rule(seconds=st.sampled_from([2, 8, 28, 45, 100, 1000]), away=st.booleans())
        def time_passes(self, seconds: float, away: bool) -> None:
            self.run(world.service.advance(seconds, service_away=away))
            if not away:
                self.run(*(self._node(name, "heartbeat") for name in world.nodes))

        @rule(
            save=calls.saves,
            wish=st.none() | calls.user_actions,
            ending=calls.finishes,
            pause=st.sampled_from([0, 8, 45]),
        )
        def an_attempt_runs_to_its_end(
            self,
            save: tuple[str, dict[str, Any]] | None,
            wish: str | None,
            ending: tuple[str, dict[str, Any]],
            pause: float,
        ) -> None:
            self.run(self._tick("scheduler"))
            self.run(self._claim(0, True))
            self.run(self._write(0, "telemetry", {"records": [calls.metric | {"step": 1}]}))
            if save is not None:
                self.run(self._write(0, *save))
            if wish is not None and self.claims:
                self.run(self._wish(self.jobs.index(self.claims[-1].job_id), wish))
            self.run(self._write(0, *ending))
            self.time_passes(pause, False)

        @precondition(lambda self: self.claims)
        @rule(
            index=st.integers(0, 2),
            action=calls.user_actions,
            ending=calls.finishes,
            who=calls.ticks,
        )
        def all_want_one_job_at_once(
            self, index: int, action: str, ending: tuple[str, dict[str, Any]], who: str
        ) -> None:
            claim = self.claims[-1 - index % len(self.claims)]
            job = self.jobs.index(claim.job_id)
            self.run(
                self._write(index, "heartbeat", {"step": 2}),
                self._wish(job, action),
                self._write(index, *ending),
                self._wish(job, "cancel" if action == "pause" else "pause"),
                self._tick(who),
                self._claim(0, True),
            )

        @precondition(lambda self: self.jobs)
        @rule()
        def two_controllers_and_two_supervisors(self) -> None:
            others = [self._tick("relay"), self._tick("reconciler")]
            self.run(*(self._tick("scheduler") for _ in range(2)), *others)
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
            artifacts = await sql("SELECT id, attempt_id FROM artifacts")
            for row in attempts:
                if row.status == "ended":
                    self._check_ended(row, {a.id for a in artifacts if a.attempt_id == row.id})
            self._check_slots([row for row in attempts if row.status != "ended"])

        def _check_ended(self, row: Any, artifacts: set[str]) -> None:
            end = (row.outcome, row.reason, row.detail, row.step, row.phase, row.acknowledged_seq)
            assert self.ended.setdefault(row.id, end) == end, "a stale supervisor has written"
            # Later checkpoints take the place of older ones, of ended attempts too.
            assert artifacts <= self.recorded.setdefault(row.id, artifacts), "or has recorded one"
            self.recorded[row.id] = artifacts

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
            assert all(count <= world.nodes[name]["cpu_slots"] for name, count in cpu.items()), cpu
            assert all(count == 1 for count in gpus.values()), gpus

        # --- and all comes to an end ----------------------------------------------------------

        def teardown(self) -> None:
            if self.jobs:
                world.run(self._settle())

        async def _settle(self) -> None:
            """With every node well again, each job that is not over runs to its end."""
            for name in world.nodes:
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
            for name in world.nodes:
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
                "SELECT job_id, attempt, sum(points) AS points FROM metric_batches GROUP BY 1, 2"
            )
            stored = {(row.job_id, row.attempt): row.points for row in rows}
            sent = Counter[tuple[str, int]]()
            for claim in self.claims:
                sent[claim.job_id, claim.attempt] += claim.points
            assert stored == {key: count for key, count in sent.items() if count}

    return Service


PROFILE: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def test_the_service_keeps_its_promises(world: Any, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(
            max_examples=10, stateful_step_count=25, derandomize=True, print_blob=True, **PROFILE
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_service_keeps_its_promises_for_long(world: Any, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(max_examples=60, stateful_step_count=45, print_blob=True, **PROFILE),
    )
