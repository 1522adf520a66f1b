"""Jobs that come at the same time: one statement, and each request its own answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from fp8core.spec import parse_spec
from octrain_api.controller.placement import need_of
from octrain_api.idempotency.repository import Kept
from octrain_api.ids import new_id
from octrain_api.jobs.submission import FirstEvent, NewJob, Submission, Unless
from octrain_api.jobs.together import StoredTogether
from octrain_api.jobs.transitions import Status

MANY = 20


def submission(spec: dict[str, Any], key: str | None = None, **changes: Any) -> Submission:
    resolved = parse_spec(spec).resolved()
    values = {
        "id": new_id("job"),
        "owner": "o",
        "spec": resolved,
        "given": spec,
        "recipe_from": None,
        "status": Status.QUEUED,
        "need": need_of(resolved),
        "traceparent": None,
    }
    job = NewJob(**(values | changes))
    kept = Kept("o", key, f"hash of {key}") if key is not None else None
    return Submission(job, [FirstEvent("status", "Submitted.", {})], "user:o", kept, None, Unless())


class Counted:
    """The connections of a service, and how often one was asked for."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self.used = 0

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        self.used += 1
        async with self._service.database.direct() as connection:
            yield connection


async def test_those_that_come_at_once_share_a_statement(lone_service: Any, spec: Any) -> None:
    connections = Counted(lone_service)
    together = StoredTogether(connections)
    asked = [submission(spec | {"priority": n % 3}, f"key {n}") for n in range(MANY)]
    stored = await asyncio.gather(*(together.store(each) for each in asked))
    assert connections.used == 1
    rows = [each.row for each in stored]
    assert [row and row.id for row in rows] == [each.job.id for each in asked]
    [counts] = await lone_service.sql(
        "SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM events) AS events, "
        "(SELECT count(DISTINCT target) FROM idempotency_keys) AS keys"
    )
    assert tuple(counts) == (MANY, MANY, MANY)
    ranked = await lone_service.sql("SELECT id FROM jobs ORDER BY priority DESC, created_at, id")
    places = {row.id: place for place, row in enumerate(ranked, start=1)}
    assert {row.id: row.position for row in rows if row is not None} == places


async def test_one_key_at_once_makes_one_job(lone_service: Any, spec: Any) -> None:
    together = StoredTogether(lone_service.database.direct)
    asked = [submission(spec, "the same") for _ in range(MANY)]
    stored = await asyncio.gather(*(together.store(each) for each in asked))
    made = [each.row.id for each in stored if each.row is not None]
    assert len(made) == 1
    # Those that went by another connection meanwhile were told to come again.
    assert {each.claim.target for each in stored if each.row is None} <= {made[0], None}
    [row] = await lone_service.sql("SELECT count(*) AS jobs FROM jobs")
    assert row.jobs == 1


async def test_statements_that_hang_hold_up_no_other(lone_service: Any, spec: Any) -> None:
    over = asyncio.Event()
    hanging = 0

    @contextlib.asynccontextmanager
    async def connection() -> AsyncIterator[Any]:
        nonlocal hanging
        if hanging < 2:
            hanging += 1
            await over.wait()
        async with lone_service.database.direct() as found:
            yield found

    together = StoredTogether(connection)
    held = []
    for number in (1, 2):
        held.append(asyncio.create_task(together.store(submission(spec))))
        while hanging < number:
            await asyncio.sleep(0)
    others = asyncio.gather(*(together.store(submission(spec)) for _ in range(MANY)))
    assert all(each.row is not None for each in await asyncio.wait_for(others, 60))
    assert not any(task.done() for task in held)
    over.set()
    assert all(each.row is not None for each in await asyncio.gather(*held))
    [row] = await lone_service.sql("SELECT count(*) AS jobs FROM jobs")
    assert row.jobs == MANY + 2


async def test_one_that_the_database_refuses_harms_no_other(lone_service: Any, spec: Any) -> None:
    together = StoredTogether(lone_service.database.direct)
    good = [submission(spec, f"key {n}") for n in range(3)]
    # No text of Postgres can hold U+0000; the layers before refuse it.
    bad = submission(spec, "bad", traceparent="a\x00b")
    results = await asyncio.gather(
        *(together.store(each) for each in (good[0], bad, *good[1:])), return_exceptions=True
    )
    assert isinstance(results.pop(1), psycopg.DataError)
    stored = await lone_service.sql("SELECT id FROM jobs")
    assert {row.id for row in stored} == {each.job.id for each in good}


async def test_one_that_is_given_up_harms_no_other(lone_service: Any, spec: Any) -> None:
    together = StoredTogether(lone_service.database.direct)
    asked = [submission(spec) for _ in range(3)]
    tasks = [asyncio.create_task(together.store(each)) for each in asked]
    await asyncio.sleep(0)
    tasks[1].cancel()
    stored = await asyncio.gather(tasks[0], tasks[2])
    assert all(each.row is not None for each in stored)
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]


async def test_a_database_that_is_away_is_told_to_each(spec: Any) -> None:
    @contextlib.asynccontextmanager
    async def away() -> AsyncIterator[Any]:
        raise psycopg.OperationalError("away")
        yield

    together = StoredTogether(away)
    for _ in range(2):  # the next ones are tried anew
        results = await asyncio.gather(
            *(together.store(submission(spec)) for _ in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [psycopg.OperationalError] * 3


async def test_a_long_queue_is_counted_once_in_a_while(lone_service: Any, spec: Any) -> None:
    await lone_service.sql(
        "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, created_at) "
        "SELECT 'job_' || n, 'o', '{}', '', 5, '{}', 'queued', 'cpu:1:amp', "
        "now() - interval '1 hour' FROM generate_series(1, 1000) AS n"
    )
    together = StoredTogether(lone_service.database.direct)
    first = await together.store(submission(spec))
    assert first.row is not None
    assert first.row.position is None
    # Places before the crowd are counted all the same.
    for priority, place in ((9, 1), (5, None), (9, 2), (0, None)):
        stored = await together.store(submission(spec | {"priority": priority}))
        assert stored.row is not None
        assert stored.row.position == place
