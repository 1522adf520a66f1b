"""The table of transitions: every pair of states for every actor, against a real database."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest

from octrain_api.jobs import transitions
from octrain_api.jobs.transitions import FINAL, PLACED, Actor, Status, TransitionRefused
from octrain_api.models import Attempt, Job

# (from, to): the actors that may, by the words of the design; `*` marks what needs a claimed
# attempt, `-` what needs that no attempt lives, `+` what needs a live one; `u` and `s` what needs
# besides that no attempt lives that a user, or the service, asked for the stop.
LEGAL = {
    ("draft", "queued"): {"user-"},
    ("draft", "cancelled"): {"user-"},
    ("queued", "starting"): {"scheduler+"},
    ("queued", "paused"): {"user-"},
    ("queued", "cancelled"): {"user-"},
    ("queued", "failed"): {"scheduler-", "reconciler-"},
    ("starting", "running"): {"supervisor*"},
    ("starting", "queued"): {"scheduler-", "supervisor-", "reconciler-", "user-"},
    ("starting", "pausing"): {"user*", "scheduler*", "reconciler*"},
    ("starting", "paused"): {"user-"},
    ("starting", "cancelling"): {"user*", "reconciler*"},
    ("starting", "cancelled"): {"user-"},
    ("starting", "succeeded"): {"supervisor-"},
    ("starting", "failed"): {"supervisor-", "reconciler-"},
    ("running", "queued"): {"supervisor-", "reconciler-"},
    ("running", "pausing"): {"user*", "scheduler*", "reconciler*"},
    ("running", "cancelling"): {"user*", "reconciler*"},
    ("running", "succeeded"): {"supervisor-"},
    ("running", "failed"): {"supervisor-", "reconciler-"},
    ("pausing", "queued"): {"supervisors", "reconcilers"},
    ("pausing", "paused"): {"supervisoru", "reconcileru"},
    ("pausing", "cancelling"): {"user*", "reconciler*"},
    ("pausing", "succeeded"): {"supervisor-"},
    ("pausing", "failed"): {"supervisor-", "reconciler-"},
    ("paused", "queued"): {"user-"},
    ("paused", "cancelled"): {"user-"},
    ("cancelling", "succeeded"): {"supervisors"},
    ("cancelling", "failed"): {"supervisors", "reconcilers"},
    ("cancelling", "cancelled"): {"supervisoru", "reconcileru"},
}


def _job(status: Status, spec: dict[str, Any]) -> Job:
    resolved = spec | {"limits": {"max_restarts": 1, "cancel_deadline_seconds": 60}}
    return Job(
        id=f"job_{uuid.uuid4().hex[:26]}",
        owner="table",
        labels={},
        notes="",
        priority=0,
        spec=resolved,
        need="cpu:1:emulated",
        status=status.value,
    )


def _attempt(job: Job, attempt_status: str) -> Attempt | None:
    """The job's attempt as far as a guard looks at it; it is not stored."""
    if attempt_status == "none":
        return None
    claimed = {"claimed_at": object()} if attempt_status == "claimed" else {}
    return Attempt(id="att_1", job_id=job.id, number=1, status="placed", **claimed)


@pytest.mark.parametrize("source", list(Status))
async def test_every_pair_is_as_the_design_says(service: Any, spec: Any, source: Status) -> None:
    wrong = []
    async with service.database.session() as session:
        for to, actor, alive, stop in itertools.product(
            Status, Actor, ("none", "placed", "claimed"), (None, "stalled")
        ):
            job = _job(source, spec)
            job.reason = stop
            session.add(job)
            await session.flush()
            allowed = LEGAL.get((source.value, to.value), set())
            expected = any(
                f"{actor.value}{mark}" in allowed
                for mark in {
                    "none": "-s" if stop else "-u",
                    "placed": "+",
                    "claimed": "+*",
                }[alive]
            )
            try:
                await transitions.apply(
                    session, job, to, actor, message="", attempt=_attempt(job, alive)
                )
                happened = True
            except TransitionRefused:
                happened = False
            if happened != expected or job.status != (to if happened else source):
                wrong.append((source, to, actor, alive, stop, happened))
            assert job.sequence == int(happened), "one event for a change, none for a refusal"
            assert job.version == 1 + int(happened)
        await session.rollback()
    assert not wrong


def test_nothing_leaves_a_final_state() -> None:
    assert not [key for key in transitions.TABLE if key[0] in FINAL]
    assert not [key for key in transitions.RESTARTS if key[0] in FINAL]


def test_every_other_state_has_a_way_to_an_end() -> None:
    edges = {(a, b) for a, b, _ in transitions.TABLE}
    reached = set(FINAL)
    while True:
        more = {a for a, b in edges if b in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(Status)
    assert {a for a, b in edges if b is Status.CANCELLED} >= {Status.QUEUED, Status.CANCELLING}
    assert {Status.STARTING, Status.RUNNING, Status.PAUSING, Status.CANCELLING} == PLACED


async def test_restarts_are_counted_and_end(service: Any, spec: Any) -> None:
    async with service.database.session() as session:
        job = _job(Status.RUNNING, spec)
        session.add(job)
        await session.flush()
        again = {"message": "", "restart": True}
        await transitions.apply(session, job, Status.QUEUED, Actor.RECONCILER, **again)
        assert job.restarts == 1
        job.status = Status.RUNNING.value
        with pytest.raises(TransitionRefused, match="restart"):
            await transitions.apply(session, job, Status.QUEUED, Actor.RECONCILER, **again)
        await session.rollback()
