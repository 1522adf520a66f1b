"""Joining the batches of an attempt into blocks, with rollups.

Writers append one small matrix a batch. Those of one tier, once there are enough of them in a row,
become one of the next tier, so a point is rewritten a few times in its life however long the run
is; what is large enough becomes a block, and so does what is left of an ended attempt. Blocks have
their own table, to which is only ever added: what is on its way to them is rewritten elsewhere.

Nothing here locks what a writer waits for: batches are only added and deleted, and one job's
compaction is kept from another's by an advisory lock.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Double,
    Text,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import IntegrityError

from octrain_api.database import Database
from octrain_api.metrics.blocks import STATS, Block, components, join, union
from octrain_api.metrics.repository import FINAL, MetricRepository, block_values
from octrain_api.metrics.rollups import Rollup, roll_up
from octrain_api.models import Attempt, MetricBatch, MetricBlock, MetricRollup

# So many batches of a tier become one of the next.
FAN_IN = 16
# A block has at most so many rows, and cells: bounds what a reader decompresses, and the memory.
MAX_ROWS = 16_384
MAX_CELLS = 1 << 22
# Batches that make half of one become one.
_SETTLED = 2
# Batches that make an eighth of one wait for the rest: a fast job's points are rewritten once.
_WORTH_WAITING = 8
MIN_VACUUM_BYTES = 32 << 20
# Seconds without a merge, after which what merges have left is given back whatever it is.
REST_SECONDS = 10.0


@dataclass(frozen=True)
class Merge:
    """Batches that become one of this tier, or a block (FINAL)."""

    batch_ids: tuple[int, ...]
    tier: int


@dataclass(frozen=True)
class OpenBatch:
    """What the plan needs to know of a batch."""

    id: int
    tier: int
    rows: int
    names: frozenset[str]


def plan(batches: Sequence[OpenBatch], ended: bool) -> Merge | None:
    """The next merge of one attempt's batches, given in the order of recording.

    Only what shares names is joined: figures of every step and the health of every hundredth would
    make a matrix of mostly empty cells, which reaches the size of a block with few points in it.
    """
    merges = (_plan_family(family, ended) for family in _families(batches))
    return next((merge for merge in merges if merge is not None), None)


def _families(batches: Sequence[OpenBatch]) -> list[list[OpenBatch]]:
    """Batches of which no two families share a name: each series has all of its own in one."""
    found: dict[int, list[OpenBatch]] = {}
    numbers = components([batch.names for batch in batches])
    for number, batch in zip(numbers, batches, strict=True):
        found.setdefault(number, []).append(batch)
    return list(found.values())


def _plan_family(batches: Sequence[OpenBatch], ended: bool) -> Merge | None:
    if ended:
        run, full = _fitting(batches)
        return Merge(tuple(batch.id for batch in run), FINAL) if run else None
    start = 0
    while start < len(batches):
        tier = batches[start].tier
        end = start
        while end < len(batches) and batches[end].tier == tier:
            end += 1
        run, full = _fitting(batches[start:end])
        if full:
            return Merge(tuple(batch.id for batch in run), FINAL)
        some = run[:FAN_IN]
        if len(some) == FAN_IN and _share_of_full(some) * _WORTH_WAITING < 1:
            return Merge(tuple(batch.id for batch in some), tier + 1)
        start = end
    return None


def _fitting(batches: Sequence[OpenBatch]) -> tuple[Sequence[OpenBatch], bool]:
    """The first batches that fit in one, and whether that is then as good as full."""
    rows, names = 0, frozenset[str]()
    for count, batch in enumerate(batches):
        more, together = rows + batch.rows, names | batch.names
        if count and (more > MAX_ROWS or more * len(together) > MAX_CELLS):
            return batches[:count], True
        rows, names = more, together
    return batches, _share_of_full(batches) * _SETTLED >= 1


def _share_of_full(batches: Sequence[OpenBatch]) -> float:
    rows = sum(batch.rows for batch in batches)
    names = frozenset[str]().union(*(batch.names for batch in batches))
    return max(rows / MAX_ROWS, rows * len(names) / MAX_CELLS)


class Compactor:
    """Compacts what there is to compact, a transaction a merge."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Bytes of the batches that merges have deleted since the last vacuum, and when that was.
        self._deleted_bytes = 0
        self._deleted_at = 0.0

    async def tick(self, max_merges: int = 20) -> bool:
        """Up to so many merges; whether there may be more to do."""
        done = 0
        for job_id, attempt, ended in await self._candidates():
            while await self.merge_next(job_id, attempt, ended):
                done += 1
                if done >= max_merges:
                    return True
        return False

    async def _candidates(self) -> list[tuple[str, int, bool]]:
        """Attempts with a merge to be made, most batches first."""
        # A sum of rows that could fill a block asks for a closer look, as many batches do.
        counted = (
            select(
                MetricBatch.job_id,
                MetricBatch.attempt,
                func.count().label("batches"),
                func.sum(MetricBatch.rows).label("rows"),
                func.sum(MetricBatch.points).label("points"),
            )
            .group_by(MetricBatch.job_id, MetricBatch.attempt)
            .subquery()
        )
        ended = exists().where(
            Attempt.job_id == counted.c.job_id,
            Attempt.number == counted.c.attempt,
            Attempt.status == "ended",
        )
        statement = (
            select(counted.c.job_id, counted.c.attempt, ended.label("ended"))
            .where(
                ended
                | (counted.c.batches >= FAN_IN)
                | (counted.c.rows * _SETTLED >= MAX_ROWS)
                | (counted.c.points * _SETTLED >= MAX_CELLS)
            )
            .order_by(counted.c.batches.desc())
        )
        async with self._database.session() as session:
            return [(r.job_id, r.attempt, r.ended) for r in await session.execute(statement)]

    async def merge_next(self, job_id: str, attempt: int, ended: bool) -> bool:
        """Make the next merge of an attempt; whether there was one."""
        async with self._database.session() as session:
            repository = MetricRepository(session)
            of_attempt = await repository.open_batches(job_id, attempt)
            layouts = await repository.layouts(list({batch.layout_id for batch in of_attempt}))
        names_of = {key: frozenset(names) for key, names in layouts.items()}
        merge = plan(
            [
                OpenBatch(batch.id, batch.tier, batch.rows, names_of[batch.layout_id])
                for batch in of_attempt
                if batch.layout_id in layouts
            ],
            ended,
        )
        if merge is None:
            return False
        # Made on its own: it may wait for a writer of the job, which must not wait in turn.
        chosen = {batch.layout_id: None for batch in of_attempt if batch.id in merge.batch_ids}
        names = union(layouts[key] for key in chosen)
        try:
            async with self._database.transaction() as session:
                layout_id = await MetricRepository(session).layout_id(job_id, names)
        except IntegrityError:
            # The job has been deleted.
            return False
        async with self._database.transaction() as session:
            lock = func.hashtextextended(f"metrics {job_id} {attempt}", 0)
            if not await session.scalar(select(func.pg_try_advisory_xact_lock(lock))):
                return False
            stored = await MetricRepository(session).load(merge.batch_ids)
            if len(stored) != len(merge.batch_ids):
                # Deleted meanwhile, or merged by another.
                return False
            final = merge.tier == FINAL
            values, rollups = await asyncio.to_thread(_join, [block for _, block in stored], final)
            values |= {
                "job_id": job_id,
                "attempt": attempt,
                "layout_id": layout_id,
                "first_seq": min(row.first_seq for row, _ in stored),
                "last_seq": stored[-1][0].last_seq,
                "created_at": stored[-1][0].created_at,
            }
            if final:
                made = insert(MetricBlock).values(values).returning(MetricBlock.id)
                block_id = await session.scalar(made)
                await session.execute(
                    insert(MetricRollup),
                    [{"block_id": block_id, **vars(rollup)} for rollup in rollups],
                )
            else:
                await session.execute(insert(MetricBatch).values(values | {"tier": merge.tier}))
            fresh = [block for row, block in stored if row.tier == 0]
            if fresh:
                await session.execute(_COUNT_IN, _count_in(job_id, attempt, layout_id, fresh))
            await session.execute(delete(MetricBatch).where(MetricBatch.id.in_(merge.batch_ids)))
        self._deleted_bytes += sum(len(row.data) for row, _ in stored)
        self._deleted_at = time.monotonic()
        return True

    async def vacuum_if_due(self) -> bool:
        """Make the room of merged batches free for the next ones, once it is an eighth of their
        table and 32 MiB, or once nothing is merged any more: the server's own vacuum comes once a
        minute, when a fast job has doubled it. What is free at the table's end is given back.
        """
        rests = time.monotonic() - self._deleted_at > REST_SECONDS
        if self._deleted_bytes < (1 if rests else MIN_VACUUM_BYTES):
            return False
        connection = await self._database.connect()
        async with connection:
            size = await connection.execute("SELECT pg_total_relation_size('metric_batches')")
            row = await size.fetchone()
            assert row is not None
            assert isinstance(row[0], int)
            if not rests and self._deleted_bytes * 8 < row[0]:
                return False
            # Neither readers nor writers wait for it.
            await connection.execute("VACUUM metric_batches")
        self._deleted_bytes = 0
        return True


def _join(blocks: Sequence[Block], final: bool) -> tuple[dict[str, Any], list[Rollup]]:
    joined = join(blocks) if len(blocks) > 1 else blocks[0]
    return block_values(joined), roll_up(joined) if final else []


_COUNT_IN = text(
    """
    INSERT INTO metric_series (job_id, attempt, layout_id, name, first_step, last_step,
                               last_value, points)
    SELECT :job_id, :attempt, :layout_id, fresh.*
    FROM unnest(:names, :first, :last, :value, :count) AS fresh
    ON CONFLICT (job_id, name, attempt) DO UPDATE SET
        first_step = least(metric_series.first_step, excluded.first_step),
        last_step = greatest(metric_series.last_step, excluded.last_step),
        last_value = excluded.last_value,
        points = metric_series.points + excluded.points
    """
).bindparams(
    bindparam("names", type_=ARRAY(Text)),
    bindparam("value", type_=ARRAY(Double)),
    *(bindparam(name, type_=ARRAY(BigInteger)) for name in ("first", "last", "count")),
)


def _count_in(job_id: str, attempt: int, layout_id: int, fresh: Sequence[Block]) -> dict[str, Any]:
    """What is added to the series' facts by points that no merge has had before."""
    whole = join(fresh) if len(fresh) > 1 else fresh[0]
    stats = np.frombuffer(whole.stats(), dtype=STATS)
    columns = {name: stats[name].tolist() for name in STATS.names or ()}
    key = {"job_id": job_id, "attempt": attempt, "layout_id": layout_id}
    return {**key, "names": list(whole.names), **columns}
