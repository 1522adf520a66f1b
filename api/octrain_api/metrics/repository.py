"""Metric blocks, their rollups and series in the database."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Integer, Row, cast, func, select, type_coerce
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from octrain_api.metrics.blocks import Block, Packed, digest, unpack
from octrain_api.metrics.codec import (
    Band,
    Directory,
    Rows,
    pack_directory,
    pack_rows,
    unpack_rows,
)
from octrain_api.models import MetricBlock, MetricLayout, MetricRollup, MetricSeries

# The tier of blocks that are never joined again.
FINAL = 100


@dataclass(frozen=True)
class Slice:
    """Some bytes of a block's data (`level` None) or of its rollup's at that level."""

    block_id: int
    level: int | None
    offset: int
    length: int


class MetricRepository:
    """Appends blocks and reads them."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(
        self, job_id: str, attempt: int, seq: int, blocks: Sequence[tuple[Block, Packed]]
    ) -> None:
        """Store one telemetry batch, number `seq` of the job's stream, as it came."""
        rows = []
        for block, packed in blocks:
            count = len(block.rows)
            numbered = Rows(
                block.rows.steps, block.rows.steps * 0 + seq, block.rows.times, block.rows.tokens
            )
            rows.append(
                {
                    "job_id": job_id,
                    "attempt": attempt,
                    "layout_id": await self.layout_id(job_id, block.names),
                    "tier": 0,
                    "first_seq": seq,
                    "last_seq": seq,
                    "rows": count,
                    "points": block.points,
                    **_content(numbered, packed, block.stats()),
                }
            )
        await self._session.execute(upsert(MetricBlock), rows)

    async def layout_id(self, job_id: str, names: Sequence[str]) -> int:
        """The layout of these names; made when it is new.

        Making one waits for whoever holds the job's row.
        """
        mark = digest(names)
        known = select(MetricLayout.id).where(
            MetricLayout.job_id == job_id, MetricLayout.digest == mark
        )
        found = await self._session.scalar(known)
        if found is None:
            made = (
                upsert(MetricLayout)
                .values(job_id=job_id, digest=mark, names=list(names))
                .on_conflict_do_update(index_elements=["job_id", "digest"], set_={"digest": mark})
                .returning(MetricLayout.id)
            )
            found = await self._session.scalar(made)
        assert found is not None
        return found

    async def layouts(self, ids: Sequence[int]) -> dict[int, list[str]]:
        """The names of these layouts."""
        statement = select(MetricLayout.id, MetricLayout.names).where(MetricLayout.id.in_(ids))
        return {row.id: row.names for row in await self._session.execute(statement)}

    async def series(
        self, job_ids: Sequence[str], names: Sequence[str] | None = None
    ) -> Sequence[Row[str, str, int, int, int, float, int]]:
        """The compacted series of jobs; `names` None for all."""
        statement = select(
            MetricSeries.job_id,
            MetricSeries.name,
            MetricSeries.attempt,
            MetricSeries.first_step,
            MetricSeries.last_step,
            MetricSeries.last_value,
            MetricSeries.points,
        ).where(MetricSeries.job_id.in_(job_ids))
        if names is not None:
            statement = statement.where(MetricSeries.name.in_(names))
        return (await self._session.execute(statement)).all()

    async def blocks(
        self,
        job_ids: Sequence[str],
        *,
        from_step: int = 0,
        to_step: int | None = None,
        after: int = 0,
        until: int | None = None,
        level: int | None = None,
        open_only: bool = False,
    ) -> Sequence[Row[Any]]:
        """What is known of the blocks that may hold such points, in the order of recording.

        With `level` also their rollups there, without data.
        """
        columns: list[Any] = [
            MetricBlock.id,
            MetricBlock.job_id,
            MetricBlock.attempt,
            MetricBlock.layout_id,
            MetricBlock.tier,
            MetricBlock.first_seq,
            MetricBlock.last_seq,
            MetricBlock.first_step,
            MetricBlock.last_step,
            MetricBlock.rows,
            MetricBlock.points,
            MetricBlock.masked,
            MetricBlock.data.is_not(None).label("raw"),
        ]
        if level is not None:
            columns += [MetricRollup.buckets, MetricRollup.row_data, MetricRollup.places]
        statement = select(*columns).where(MetricBlock.job_id.in_(job_ids))
        if level is not None:
            statement = statement.outerjoin(
                MetricRollup,
                (MetricRollup.block_id == MetricBlock.id) & (MetricRollup.level == level),
            )
        if from_step > 0:
            statement = statement.where(MetricBlock.last_step >= from_step)
        if to_step is not None:
            statement = statement.where(MetricBlock.first_step <= to_step)
        if after > 0:
            statement = statement.where(MetricBlock.last_seq > after)
        if until is not None:
            statement = statement.where(MetricBlock.first_seq <= until)
        if open_only:
            statement = statement.where(MetricBlock.tier < FINAL)
        statement = statement.order_by(MetricBlock.job_id, MetricBlock.last_seq, MetricBlock.id)
        return (await self._session.execute(statement)).all()

    async def stats(self, block_ids: Sequence[int]) -> dict[int, bytes]:
        """The column statistics of blocks."""
        return await self._bytes(MetricBlock.stats, block_ids)

    async def directories(self, block_ids: Sequence[int]) -> dict[int, Directory]:
        """Where the bands of blocks lie."""
        found = await self._bytes(MetricBlock.directory, block_ids)
        return {key: Directory(data) for key, data in found.items()}

    async def rows(self, counts: dict[int, int]) -> dict[int, Rows]:
        """What the rows of blocks share; `counts` says how many each has."""
        found = await self._bytes(MetricBlock.row_data, list(counts))
        return {key: unpack_rows(data, counts[key]) for key, data in found.items()}

    async def _bytes(self, column: Any, block_ids: Sequence[int]) -> dict[int, bytes]:
        if not block_ids:
            return {}
        statement = select(MetricBlock.id, column).where(MetricBlock.id.in_(block_ids))
        return {row[0]: row[1] for row in await self._session.execute(statement)}

    async def rollups(self, block_ids: Sequence[int]) -> dict[int, list[MetricRollup]]:
        """Every rollup of blocks, without data, by block."""
        found: dict[int, list[MetricRollup]] = {}
        if block_ids:
            statement = (
                select(MetricRollup)
                .where(MetricRollup.block_id.in_(block_ids))
                .options(defer(MetricRollup.data, raiseload=True))
            )
            for rollup in await self._session.scalars(statement):
                found.setdefault(rollup.block_id, []).append(rollup)
        return found

    async def slices(self, wanted: Sequence[Slice]) -> list[bytes | None]:
        """Bytes of blocks, or of their rollups, in the order asked for; None where none are."""
        found: list[bytes | None] = [None] * len(wanted)
        for table, key, of in (
            (MetricBlock, MetricBlock.id, [n for n, s in enumerate(wanted) if s.level is None]),
            (
                MetricRollup,
                MetricRollup.block_id,
                [n for n, s in enumerate(wanted) if s.level is not None],
            ),
        ):
            if not of:
                continue
            columns = {
                "place": of,
                "block_id": [wanted[n].block_id for n in of],
                "level": [wanted[n].level or 0 for n in of],
                "begin": [wanted[n].offset + 1 for n in of],
                "size": [wanted[n].length for n in of],
            }
            asked = (
                func.unnest(*(cast(values, ARRAY(BigInteger)) for values in columns.values()))
                .table_valued(*columns)
                .render_derived(name="asked")
            )
            data = func.substring(
                table.data, cast(asked.c.begin, Integer), cast(asked.c.size, Integer)
            )
            statement = select(asked.c.place, type_coerce(data, MetricRollup.data.type)).join(
                table, key == asked.c.block_id
            )
            if table is MetricRollup:
                statement = statement.where(MetricRollup.level == asked.c.level)
            for place, part in await self._session.execute(statement):
                found[place] = part
        return found

    async def load(self, block_ids: Sequence[int]) -> list[tuple[MetricBlock, Block]]:
        """Whole blocks in the order of recording; without those whose raw points are gone."""
        return await self._load(MetricBlock.id.in_(block_ids))

    async def _load(self, *where: ColumnElement[bool]) -> list[tuple[MetricBlock, Block]]:
        # One statement: between two, blocks could be joined into others.
        statement = (
            select(MetricBlock)
            .where(MetricBlock.data.is_not(None), *where)
            .order_by(MetricBlock.last_seq, MetricBlock.id)
            .execution_options(populate_existing=True)
        )
        stored = (await self._session.scalars(statement)).all()
        names = await self.layouts(list({block.layout_id for block in stored}))
        return [(block, _unpacked(block, names[block.layout_id])) for block in stored]

    async def batches_after(self, job_id: str, after: int, until: int) -> list["BatchSeries"]:
        """The points of the batches numbered in (after, until], by number and name."""
        stored = await self._load(
            MetricBlock.job_id == job_id,
            MetricBlock.last_seq > after,
            MetricBlock.first_seq <= until,
        )
        found: list[BatchSeries] = []
        for row, block in stored:
            found.extend(_by_batch(row.attempt, block, after, until))
        return sorted(found, key=lambda batch: (batch.seq, batch.name))


@dataclass(frozen=True)
class BatchSeries:
    """The points of one series in one telemetry batch."""

    seq: int
    name: str
    attempt: int
    steps: list[int]
    values: list[float]


def _by_batch(attempt: int, block: Block, after: int, until: int) -> list[BatchSeries]:
    rows = block.rows
    found = []
    for seq in sorted({int(n) for n in rows.seqs if after < n <= until}):
        of_batch = rows.seqs == seq
        for column, name in enumerate(block.names):
            where = of_batch if block.present is None else of_batch & block.present[column]
            steps = rows.steps[where].tolist()
            if steps:
                values = block.values[column][where].tolist()
                found.append(BatchSeries(seq, name, attempt, steps, values))
    return found


def _content(rows: Rows, packed: Packed, stats: bytes) -> dict[str, Any]:
    return {
        "first_step": int(rows.steps.min()),
        "last_step": int(rows.steps.max()),
        "masked": packed.masked,
        "row_data": pack_rows(rows),
        "stats": stats,
        "directory": pack_directory(packed.bands),
        "data": packed.data,
    }


def block_values(block: Block) -> dict[str, Any]:
    """The columns of the table that hold a block's content."""
    content = _content(block.rows, block.pack(), block.stats())
    return {"rows": len(block.rows), "points": block.points, **content}


def _unpacked(stored: MetricBlock, names: Sequence[str]) -> Block:
    assert stored.data is not None
    directory = Directory(stored.directory)
    bands = [Band(len(directory.columns(n)), directory.place(n)[1]) for n in range(len(directory))]
    rows = unpack_rows(stored.row_data, stored.rows)
    return unpack(Packed(tuple(names), rows, stored.masked, bands, stored.data))
