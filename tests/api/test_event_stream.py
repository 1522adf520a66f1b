"""The live stream of all jobs' events: one order that no late commit slips in behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from octrain_api.events.order import EventPosition
from tests.api.live import Told, listening, parse


@pytest.fixture
async def key(lone_service: Any) -> str:
    return str(await lone_service.key("ada", "jobs:read"))


def jobs_of(told: list[Told]) -> list[tuple[str, int]]:
    return [(one.data["job_id"], one.data["seq"]) for one in told if "job_id" in one.data]


async def test_events_of_ones_own_jobs_live_and_from_the_beginning(
    lone_service: Any, user: Any, submit: Any, key: str
) -> None:
    stranger = await lone_service.user("eve")
    before = await submit(user, name="before")
    path = "/v1/events/stream"
    root = await lone_service.key("root", "admin")
    async with (
        listening(lone_service.app, path, key) as mine,
        listening(lone_service.app, path, root) as all_of_them,
    ):
        begun = await mine.until(lambda told: told)
        assert [one.event for one in begun] == ["begin"]
        assert begun[0].id == begun[0].data["after"]
        await all_of_them.until(lambda told: told)
        theirs = await submit(stranger)
        first = await submit(user)
        await user.post(f"/jobs/{before}/cancel")
        told = await mine.until(lambda told: len(told) == 3)
        every = await all_of_them.until(lambda told: len(told) == 4)
    assert jobs_of(told) == [(first, 1), (before, 2)]
    assert [one.data["status"] for one in told[1:]] == ["queued", "cancelled"]
    assert jobs_of(every) == [(theirs, 1), (first, 1), (before, 2)]
    whole = parse((await user.get("/events/stream?after=0&max_seconds=0.5")).text)
    assert jobs_of(whole) == [(before, 1), (first, 1), (before, 2)]
    ids = [one.id for one in whole if "job_id" in one.data]
    for place, identifier in enumerate(ids, start=1):
        answer = await user.get(
            "/events/stream?max_seconds=0.2", headers={"Last-Event-ID": str(identifier)}
        )
        assert jobs_of(parse(answer.text)) == jobs_of(whole)[place:]
    nothing = await user.get("/events/stream?after=0&include=events&max_seconds=0.2")
    assert jobs_of(parse(nothing.text)) == []


async def test_ids_that_are_none(lone_service: Any, user: Any) -> None:
    for bad in ("x", "1:2", "1:job_1:", "9" * 19, "-1", "1:job_1:1:1", "٣"):
        answer = await user.get("/events/stream", params={"after": bad, "max_seconds": 0.1})
        assert answer.status_code == 422, bad
        assert answer.json()["errors"][0]["pointer"] == "/query/after"
    for query in ("include=metrics", "include=nonsense"):
        assert (await user.get(f"/events/stream?{query}")).status_code == 422
    future = parse((await user.get(f"/events/stream?after={10**15}&max_seconds=0.2")).text)
    assert [one.event for one in future] == ["reset", "reconnect"]
    assert future[0].id == future[1].data["after"]


def test_positions_are_ordered_and_survive_as_text() -> None:
    positions = [
        EventPosition(3),
        EventPosition(3, "job_a", 1),
        EventPosition(3, "job_a", 2),
        EventPosition(3, "job_b", 1),
        EventPosition(4),
    ]
    mixed = [positions[place] for place in (3, 0, 4, 2, 1)]
    assert sorted(mixed) == positions
    assert [EventPosition.parse(str(one)) for one in positions] == positions


async def test_no_commit_is_passed_over_however_late(
    lone_service: Any, user: Any, submit: Any, key: str
) -> None:
    """Transactions that write events and stay open while later ones commit, and readers that
    begin, break off and come back at any moment."""
    jobs = [await submit(user) for _ in range(4)]
    randomly = random.Random(7)
    written: set[tuple[str, int]] = {(job, 1) for job in jobs}
    seqs = dict.fromkeys(jobs, 1)
    locks = {job: asyncio.Lock() for job in jobs}
    seen: list[tuple[str, int]] = []
    done = asyncio.Event()

    async def write(job: str) -> None:
        # As the service does: numbered under the job's lock, one transaction for some of them.
        async with locks[job], lone_service.database.transaction() as session:
            for _ in range(randomly.randint(1, 3)):
                seqs[job] += 1
                connection = await session.connection()
                await connection.exec_driver_sql(
                    "INSERT INTO events (job_id, seq, kind, actor, message, data) "
                    "VALUES (%s, %s, 'note', 'test', '', '{}')",
                    (job, seqs[job]),
                )
                written.add((job, seqs[job]))
                await asyncio.sleep(randomly.random() * 0.02)
            await connection.exec_driver_sql("SELECT pg_notify('octrain_job', %s)", (job,))

    async def read() -> None:
        last = "0"
        path = "/v1/events/stream"
        while True:
            finishing = done.is_set()
            async with listening(lone_service.app, path, key, last_event_id=last) as client:
                if finishing:
                    await client.until(lambda told: len(seen) + len(jobs_of(told)) >= len(written))
                else:
                    await asyncio.sleep(randomly.random() * 0.05)
                client.taking.clear()
                told = client.told
            # A connection may break off between two messages of one transaction.
            kept = told[: randomly.randint(0, len(told))] if not finishing else told
            seen.extend(jobs_of(kept))
            last = next((one.id for one in reversed(kept) if one.id), last)
            if finishing:
                return

    reader = asyncio.create_task(read())
    for _ in range(15):
        await asyncio.gather(*(write(job) for job in jobs))
    done.set()
    await reader
    assert len(seen) == len(set(seen)), "nothing is told twice"
    assert set(seen) == written, "nothing is missed"
    for job in jobs:
        mine = [seq for one, seq in seen if one == job]
        assert mine == sorted(mine), "a job's events come in their order"


async def test_an_open_transaction_keeps_later_ones_back_and_then_both_come(
    lone_service: Any, user: Any, submit: Any, key: str
) -> None:
    early, late = await submit(user), await submit(user)
    insert = (
        "INSERT INTO events (job_id, seq, kind, actor, message, data) "
        "VALUES (%s, 50, 'note', 'test', '', '{}')"
    )
    async with (
        listening(lone_service.app, "/v1/events/stream", key) as client,
        listening(lone_service.app, f"/v1/jobs/{late}/stream", key) as of_one_job,
    ):
        await client.until(lambda told: told)
        first = await lone_service.database.connect()
        async with first:
            await first.set_autocommit(False)
            await first.execute(insert, (early,))
            second = await lone_service.database.connect()
            async with second:
                await second.execute(insert, (late,))
                await second.execute("SELECT pg_notify('octrain_job', %s)", (late,))
            # What is committed is not told before what may yet come before it.
            await user.post(f"/jobs/{late}/pause")
            await of_one_job.until(lambda told: any("paused" in str(one) for one in told))
            assert jobs_of(client.told) == []
            await first.commit()
        told = await client.until(lambda told: len(jobs_of(told)) == 3)
    assert jobs_of(told) == [(early, 50), (late, 50), (late, 2)]
