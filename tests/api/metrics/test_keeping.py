"""Compaction and retention: what they leave, and that no writer waits for them."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from octrain_api.controller.metrics import MetricKeeper
from octrain_api.metrics import compaction
from octrain_api.metrics.compaction import OpenBatch, plan
from octrain_api.metrics.repository import FINAL
from octrain_api.metrics.retention import sweep
from octrain_api.settings import MetricSettings
from tests.api.holding import held


def batches(*tiers: int, rows: int = 10, names: int = 3) -> list[OpenBatch]:
    columns = frozenset(f"m{n}" for n in range(names))
    return [OpenBatch(n, tier, rows, columns) for n, tier in enumerate(tiers)]


def test_the_plan_joins_runs_of_one_tier() -> None:
    few = batches(*[1] * 3, *[0] * 15)
    assert plan(few, ended=False) is None
    merge = plan(batches(*[1] * 3, *[0] * 20), ended=False)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == (tuple(range(3, 19)), 1)
    merge = plan(batches(*[1] * 16, *[0] * 20), ended=False)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == (tuple(range(16)), 2)
    merge = plan(few, ended=True)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == (tuple(range(18)), FINAL)
    assert plan([], ended=True) is None


def test_only_what_shares_names_is_joined() -> None:
    """Figures of each step, and the health of some: apart, but in their order."""
    names = [frozenset({"a", "b"}), frozenset({"h1", "h2"})]
    mixed = [OpenBatch(n, 0, 10, names[n % 2]) for n in range(31)]
    merge = plan(mixed, ended=False)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == (tuple(range(0, 32, 2)), 1)
    left = [batch for batch in mixed if batch.id not in merge.batch_ids]
    assert plan(left, ended=False) is None
    merge = plan(left, ended=True)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == (tuple(range(1, 31, 2)), FINAL)
    # Whatever links them makes them one: a series then has all of its batches in one order.
    link = OpenBatch(31, 0, 10, frozenset({"b", "h1"}))
    merge = plan([*mixed, link], ended=True)
    assert merge is not None
    assert merge.batch_ids == tuple(range(32))


def test_a_block_that_is_full_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compaction.MAX_ROWS // 3
    merge = plan(batches(0, 0, 0, 0, 0, rows=rows), ended=False)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == ((0, 1, 2), FINAL)
    # Sixteen that make an eighth of one wait until they make half.
    rows = compaction.MAX_ROWS // 128
    assert plan(batches(*[0] * 63, rows=rows), ended=False) is None
    merge = plan(batches(*[0] * 64, rows=rows), ended=False)
    assert merge is not None
    assert (len(merge.batch_ids), merge.tier) == (64, FINAL)
    merge = plan(batches(*[0] * 63, rows=rows - 1), ended=False)
    assert merge is not None
    assert (len(merge.batch_ids), merge.tier) == (16, 1)
    # One that is larger than a block should be is final alone.
    monkeypatch.setattr(compaction, "MAX_CELLS", 1000)
    merge = plan(batches(0, 0, rows=10, names=1000), ended=False)
    assert merge is not None
    assert (merge.batch_ids, merge.tier) == ((0,), FINAL)


async def tiers(job: Any) -> list[int]:
    """Of the job's matrices in the order of recording; FINAL for blocks."""
    rows = await job.service.sql(
        "SELECT tier, last_seq, id FROM metric_batches WHERE job_id = :job "
        "UNION ALL SELECT 100, last_seq, 0 FROM metric_blocks WHERE job_id = :job "
        "ORDER BY last_seq, id",
        job=job.id,
    )
    return [row.tier for row in rows]


async def test_small_batches_become_large_blocks(job: Any, helpers: Any) -> None:
    values = {f"m{n}": float(n) for n in range(5)}
    for step in range(1, 36):
        await job.send(helpers.metric(step, values | {"m0": math.sin(step)}))
    await job.compact()
    assert await tiers(job) == [1, 1, 0, 0, 0]
    await job.restart()
    await job.send(helpers.metric(36, values))
    await job.compact()
    # The ended attempt is settled; the new one has too little.
    assert await tiers(job) == [FINAL, 0]
    levels = await job.service.sql("SELECT level FROM metric_rollups ORDER BY level")
    assert [row.level for row in levels] == [4096]
    answer = await job.get(name="m0")
    assert [len(s["points"]) for s in answer["series"]] == [35, 1]


async def test_old_points_go_and_their_rollups_stay(job: Any, helpers: Any) -> None:
    values = [math.sin(step) for step in range(1000)]
    values[437], values[700] = 1e9, math.nan
    await job.send(*(helpers.metric(step, {"a": v}) for step, v in enumerate(values)))
    await job.restart()
    await job.compact()
    query = {"form": "buckets", "max_points": 20}
    before = await job.get(**query)
    settings = MetricSettings(raw_days=1)
    assert await sweep(job.service.database, settings) == 0
    await job.service.sql("UPDATE metric_blocks SET created_at = now() - interval '2 days'")
    assert await sweep(job.service.database, settings) == 1
    assert await sweep(job.service.database, settings) == 0
    rows = await job.service.sql("SELECT data IS NULL AS gone FROM metric_blocks")
    assert [row.gone for row in rows] == [True]
    assert await job.get(**query) == before
    # Where the points are asked for, the spikes are what is left of them.
    (series,) = (await job.get())["series"]
    assert [437, 1e9] in series["points"]
    assert [700, "NaN"] in series["points"]
    assert len(series["points"]) <= 3 * (1000 // 64 + 1)
    (series,) = (await job.get(form="buckets", max_points=1000))["series"]
    assert sum(series["buckets"]["count"]) == 1000
    newest = await job.get("/metrics/latest")
    assert await sweep(job.service.database, MetricSettings(rollup_days=1)) == 1
    assert (await job.get())["series"] == []
    assert await job.get("/metrics/latest") == newest


async def test_the_oldest_points_go_when_all_take_too_much(job: Any, helpers: Any) -> None:
    for attempt in range(3):
        start = attempt * 1000
        await job.send(*(helpers.metric(start + n, {"a": math.sin(n)}) for n in range(500)))
        await job.restart()
        await job.compact()
    sizes = await job.service.sql("SELECT octet_length(data) AS size FROM metric_blocks")
    most = sum(row.size for row in sizes) - 1
    assert await sweep(job.service.database, MetricSettings(raw_max_bytes=most)) == 1
    rows = await job.service.sql("SELECT data IS NULL AS gone FROM metric_blocks ORDER BY id")
    assert [row.gone for row in rows] == [True, False, False]


class Held:
    """Stops a merge in the middle of its transaction until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self._join = compaction._join
        monkeypatch.setattr(compaction, "_join", self)

    def __call__(self, *arguments: Any) -> Any:
        self.inside.set()
        assert self.go_on.wait(60)
        return self._join(*arguments)


async def test_neither_a_sweep_nor_a_merge_makes_a_writer_wait(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are held in the middle of their transaction while a writer sends."""
    await job.send(*(helpers.metric(n, {"a": 1.0}) for n in range(200)))
    await job.restart()
    await job.compact()
    for step in range(20):
        await job.send(helpers.metric(step, {"a": 2.0}))
    database = job.service.database
    merge = Held(monkeypatch)
    merging = asyncio.create_task(
        compaction.Compactor(database).merge_next(job.id, job.attempt, ended=False)
    )
    settings = MetricSettings(raw_days=1e-9)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(merge.inside.wait, 60)
        async with held(job.service, "UPDATE", "metric_blocks") as inside:
            sweeping = asyncio.create_task(sweep(database, settings))
            await inside()
            await job.send(helpers.metric(20, {"a": 3.0, "new": 1.0}))
            # And another sweep passes over what the first one holds.
            assert await sweep(database, settings) == 0
            assert not sweeping.done()
        assert await sweeping == 1
        merge.go_on.set()
        assert await merging
    assert (await tiers(job))[:3] == [FINAL, 1, 0]
    (series,) = (await job.get(name="a", attempt=2))["series"]
    assert [x for x, _ in series["points"]] == list(range(21))


async def test_a_job_deleted_in_the_middle_of_a_merge_takes_all_along(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(20):
        await job.send(helpers.metric(step, {"a": 2.0}))
    merge = Held(monkeypatch)
    compactor = compaction.Compactor(job.service.database)
    merging = asyncio.create_task(compactor.merge_next(job.id, job.attempt, ended=False))
    async with asyncio.timeout(30):
        assert await asyncio.to_thread(merge.inside.wait, 60)
        deleting = asyncio.create_task(
            job.service.sql("DELETE FROM jobs WHERE id = :job", job=job.id)
        )
        merge.go_on.set()
        await asyncio.gather(merging, deleting, return_exceptions=True)
    for table in ("layouts", "series", "batches", "blocks"):
        assert await job.service.sql(f"SELECT 1 FROM metric_{table}") == []
    assert await job.service.sql("SELECT 1 FROM metric_rollups") == []
    assert not await compactor.merge_next(job.id, job.attempt, ended=True)


async def test_the_controller_keeps_house(job: Any, helpers: Any) -> None:
    for step in range(40):
        await job.send(helpers.metric(step, {"a": 2.0}))
    keeper = MetricKeeper(job.service.database, MetricSettings(raw_days=1, sweep_interval=3600))
    while await keeper.tick():
        pass
    assert await tiers(job) == [1, 1, *[0] * 8]


async def test_the_room_of_merged_batches_is_used_again_and_given_back(
    job: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MIN_VACUUM_BYTES", 100_000)
    compactor = compaction.Compactor(job.service.database)

    async def size(table: str) -> int:
        rows = await job.service.sql(f"SELECT pg_total_relation_size('{table}') AS size")
        return int(rows[0].size)

    # Another's open transaction would keep the dead rows: there is none in this database.
    sizes = []
    step = 0
    for _ in range(4):
        for _ in range(16):
            batch = range(step, step + 40)
            step += 40
            noise = ({f"m{n}": math.sin(n * 7919 + at) for n in range(40)} for at in batch)
            await job.send(*(helpers.metric(at, row) for at, row in zip(batch, noise, strict=True)))
        assert await compactor.tick() is False
        assert await compactor.vacuum_if_due()
        assert not await compactor.vacuum_if_due()
        sizes.append(await size("metric_batches"))
    # Each round adds its points once, though it wrote them twice.
    growth = (sizes[-1] - sizes[0]) / 3
    (live,) = await job.service.sql("SELECT sum(octet_length(data)) AS size FROM metric_batches")
    assert growth < 1.6 * live.size / 4
    # In the end nothing is left of what was rewritten, and what is kept has no room between.
    await job.restart()
    await job.compact()
    monkeypatch.setattr(compaction, "REST_SECONDS", 0.0)
    compactor._deleted_bytes = 1
    assert await compactor.vacuum_if_due()
    assert await size("metric_batches") < sizes[-1] / 4
    kept = await size("metric_blocks") + await size("metric_rollups")
    (live,) = await job.service.sql(
        "SELECT (SELECT sum(octet_length(data)) FROM metric_blocks) "
        "+ (SELECT sum(octet_length(data)) FROM metric_rollups) AS size"
    )
    assert kept < 1.2 * live.size + 200_000
