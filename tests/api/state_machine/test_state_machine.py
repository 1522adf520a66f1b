"""Random calls of everybody at a real database: what must never be, never is, and all ends.

Users, supervisors (stale ones too), nodes, an administrator, the scheduler, the relay and the
reconciler act in any order, some of them at the same time, while the database's clock jumps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.api.state_machine.promises import Claimed, Promises

SETTLED = 60


def machine(world: Any, spec: dict[str, Any]) -> type[RuleBasedStateMachine]:
    """The machine over this world.

    No rule waits for a condition: what calls at the same time come to differs from one run to the
    next, and Hypothesis must be able to draw the same rules again. Those that find nothing to do
    do nothing; there is always a job.
    """
    calls = world.calls

    class Service(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.jobs: list[str] = []
            # Those that somebody has asked to delete.
            self.unwanted: set[str] = set()
            self.claims: list[Claimed] = []
            self.promises = Promises(world, self.jobs, self.unwanted, self.claims)
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

        async def _post(
            self, wish: dict[str, Any], *, draft: bool = False, key: str | None = None
        ) -> None:
            answer = await world.user.post(
                "/jobs",
                json=spec | wish,
                params={"draft": draft},
                headers={"Idempotency-Key": key} if key is not None else None,
            )
            if key is not None and answer.status_code == 409:
                # The same request is being answered at this moment.
                assert "in-flight" in answer.json()["type"], answer.text
                return
            assert answer.status_code in (200, 201), answer.text
            self._made(answer.json()["id"], again=key is not None)

        def _made(self, job_id: str, *, again: bool = False) -> None:
            if job_id not in self.jobs:
                self.jobs.append(job_id)
            else:
                assert again, "one job for two requests"

        async def _clone(self, index: int, draft: bool) -> None:
            if not self.jobs:
                return
            source = self.jobs[index % len(self.jobs)]
            answer = await world.user.post(
                f"/jobs/{source}/clone", params={"draft": draft}, json={"priority": 1}
            )
            if answer.status_code == 404 and source in self.unwanted:
                return
            assert answer.status_code == 201, answer.text
            self._made(answer.json()["id"])

        async def _delete(self, index: int) -> None:
            if not self.jobs:
                return
            job_id = self.jobs[index % len(self.jobs)]
            self.unwanted.add(job_id)
            answer = await world.user.delete(f"/jobs/{job_id}")
            assert answer.status_code in (204, 404, 409), answer.text

        async def _wish(self, index: int, action: str, *, stranger: bool = False) -> None:
            if not self.jobs:
                return
            client = world.stranger if stranger else world.user
            job_id = self.jobs[index % len(self.jobs)]
            answer = await client.post(f"/jobs/{job_id}/{action}")
            if answer.status_code == 404:
                assert stranger or job_id in self.unwanted, answer.text
            else:
                assert not stranger, answer.text
                assert answer.status_code in (200, 409), answer.text

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
            asked_at = world.now
            answer = await world.node.post(f"/attempts/{row.id}/claim", json=body)
            assert answer.status_code in (200, 409), answer.text
            assert answer.status_code == 409 or right_node
            if answer.status_code == 200:
                got = answer.json()
                claim = Claimed(
                    row.id, got["job_id"], got["attempt"], node, got["fencing_token"], 0, 0.0
                )
                claim.take_lease(asked_at, got)
                self.claims.append(claim)
                asked_at = world.now
                again = await world.node.post(f"/attempts/{row.id}/claim", json=body)
                assert again.status_code in (200, 409), again.text
                if again.status_code == 200:
                    claim.take_lease(asked_at, again.json())

        def _one(self, index: int) -> Claimed | None:
            # Mostly the newest: the old ones are stale for ever.
            return self.claims[-1 - index % len(self.claims)] if self.claims else None

        async def _write(self, index: int, action: str, body: dict[str, Any]) -> None:
            claim = self._one(index)
            if claim is None:
                return
            lost = False
            if action == "telemetry":
                body = {"first_seq": claim.seq + 1} | body
            if action == "heartbeat":
                body = {"lease_number": claim.lease_number} | body
                lost = body.pop("lost", False)
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
            asked_at = world.now
            answer = await world.node.post(url, json={"fencing_token": claim.token} | body)
            # Who has ended the attempt may say so again, in the same words.
            fenced = stale and action != "finish"
            assert answer.status_code in ((409,) if fenced else (200, 409)), answer.text
            if action == "heartbeat" and answer.status_code == 200 and not lost:
                claim.take_lease(asked_at, answer.json())
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
                if action == "reboot":
                    world.boots[name] += 1
                    for claim in self.claims:
                        if claim.node == name:
                            # Nothing of it lives, whatever lease it held.
                            claim.lease_ends = 0.0
                answer = await world.register(name)
            else:
                answer = await world.admin.post(f"/nodes/{node_id}/{action}")
            assert answer.status_code == 200, answer.text

        # --- in which order -------------------------------------------------------------------

        @rule(wish=calls.wishes, draft=st.booleans())
        def a_user_posts(self, wish: dict[str, Any], draft: bool) -> None:
            self.run(self._post(wish, draft=draft))

        @rule(index=calls.pick, draft=st.booleans(), delete=st.booleans())
        def a_user_clones_or_deletes(self, index: int, draft: bool, delete: bool) -> None:
            self.run(self._delete(index) if delete else self._clone(index, draft))

        @rule(
            wishes=st.lists(calls.wishes, min_size=2, max_size=4),
            index=calls.pick,
            same=st.booleans(),
            draft=st.booleans(),
        )
        def many_users_at_once(
            self, wishes: list[dict[str, Any]], index: int, same: bool, draft: bool
        ) -> None:
            """On as many connections: posts, some of one request sent twice, and what people do to
            one job and to the one before it while the scheduler places them."""
            keys = [f"key-{len(self.jobs)}-{number}" for number in range(len(wishes))]
            posts = [
                self._post(wish, draft=draft, key=key)
                for wish, key in zip(wishes, keys, strict=True)
                for _ in range(1 + same)
            ]
            newest = len(self.jobs) - 1
            self.run(
                *posts,
                self._wish(index, "cancel"),
                self._wish(index, "start"),
                self._wish(newest, "cancel"),
                self._wish(newest, "pause"),
                self._clone(index, draft),
                self._delete(index),
                self._tick("scheduler"),
                self._claim(0, True),
            )

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
            self.run(world.advance(seconds, service_away=away))
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

        @rule(
            index=st.integers(0, 2),
            action=calls.user_actions,
            ending=calls.finishes,
            who=calls.ticks,
        )
        def all_want_one_job_at_once(
            self, index: int, action: str, ending: tuple[str, dict[str, Any]], who: str
        ) -> None:
            claim = self._one(index)
            if claim is None:
                return
            job = self.jobs.index(claim.job_id)
            self.run(
                self._write(index, "heartbeat", {"step": 2}),
                self._wish(job, action),
                self._write(index, *ending),
                self._wish(job, "cancel" if action == "pause" else "pause"),
                self._tick(who),
                self._claim(0, True),
            )

        @rule(
            wish=calls.wishes,
            action=st.sampled_from(["cancel", "pause"]),
            seconds=st.sampled_from([200, 45, 1000]),
        )
        def a_stop_is_not_heard(self, wish: dict[str, Any], action: str, seconds: float) -> None:
            """The answer that says it and shortens the lease is lost, and the node cut off."""
            self.run(self._post(wish | {"resources": {"device": "cpu"}, "priority": 2}))
            self.run(self._tick("scheduler"))
            self.run(self._claim(0, True))
            if self.claims:
                self.run(self._write(0, "heartbeat", {"step": None}))
                self.run(self._wish(self.jobs.index(self.claims[-1].job_id), action))
                self.run(self._write(0, "heartbeat", {"step": None, "lost": True}))
            self.time_passes(seconds, False)
            self.run(self._tick("reconciler"))

        @rule()
        def two_controllers_and_two_supervisors(self) -> None:
            others = [self._tick("relay"), self._tick("reconciler")]
            self.run(*(self._tick("scheduler") for _ in range(2)), *others)
            self.run(*(self._claim(0, True) for _ in range(2)))

        # --- what never is --------------------------------------------------------------------

        @invariant()
        def holds(self) -> None:
            world.run(self.promises.check())

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
                await world.user.post(f"/jobs/{job_id}/start")
            for number in range(SETTLED):
                open_jobs = await world.service.sql(
                    "SELECT id FROM jobs WHERE status NOT IN ('succeeded', 'failed', 'cancelled') "
                    "AND deleted_at IS NULL"
                )
                if not open_jobs:
                    break
                # At first everybody speaks, of what is over too; later of what is still open.
                await self._round({row.id for row in open_jobs} if number else set(self.jobs))
                await self.promises.check()
            else:
                rows = await world.service.sql(
                    "SELECT id, status, need, waiting_for FROM jobs LEFT JOIN queue_groups "
                    "USING (need) WHERE ended_at IS NULL AND deleted_at IS NULL"
                )
                raise AssertionError(f"nobody will ever pick these: {rows}")
            assert not await world.service.sql("SELECT 1 FROM outbox")
            await self._tick("scheduler")
            assert not await world.service.sql("SELECT 1 FROM queue_groups")
            await self.promises.check_points()

        async def _round(self, jobs: set[str]) -> None:
            """Some time in which these jobs, and what was claimed of them, are seen to."""
            await world.advance(20)
            for name in world.nodes:
                await self._node(name, "heartbeat")
            await world.scheduler.run()
            await world.relay()
            placed = await world.service.sql("SELECT 1 FROM attempts WHERE status = 'placed'")
            for _ in placed:
                await self._claim(0, True)
            for claim in (claim for claim in self.claims if claim.job_id in jobs):
                await world.node.post(
                    f"/attempts/{claim.attempt_id}/finish",
                    json={
                        "fencing_token": claim.token,
                        "outcome": "succeeded",
                        "reason": "completed",
                    },
                )
            await world.reconcile(api_alive=True)
            for job_id in (job_id for job_id in self.jobs if job_id in jobs):
                await world.user.post(f"/jobs/{job_id}/resume")

    return Service


PROFILE: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.timeout(600)
def test_the_service_keeps_its_promises(world: Any, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(
            max_examples=15, stateful_step_count=30, derandomize=True, print_blob=True, **PROFILE
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_service_keeps_its_promises_for_long(world: Any, spec: dict[str, Any]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(world, spec),
        settings=settings(max_examples=60, stateful_step_count=45, print_blob=True, **PROFILE),
    )
