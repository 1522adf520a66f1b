"""Metric blocks, their rollups and series in the database."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    LargeBinary,
    Row,
    Text,
    and_,
    case,
    cast,
    column,
    func,
    select,
    true,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.metrics.blocks import Block, Packed, digest, unpack
from octrain_api.metrics.codec import (
    Band,
    Directory,
    Rows,
    pack_directory,
    pack_rows,
    unpack_rows,
)
from octrain_api.metrics.summary import STORED
from octrain_api.models import MetricBlock, MetricLayout, MetricRollup, MetricSeries

# The tier of blocks that are never joined again.
FINAL = 100


@dataclass(frozen=True)
class Slice:
    """Some bytes of a block's data."""

    block_id: int
    offset: int
    length: int


def _unnested(**columns: Sequence[int]) -> Any:
    """A table of these columns."""
    arrays = (cast(list(values), ARRAY(BigInteger)) for values in columns.values())
    return func.unnest(*arrays).table_valued(*columns).render_derived(name="asked")


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
    ) -> Sequence[Any]:
        """What is known of the blocks that may hold such points, in the order of recording.

        Those of tier 0 come along whatever they hold: no fact of theirs stands elsewhere.
        """
        block = MetricBlock
        statement = select(
            block.id,
            block.job_id,
            block.attempt,
            block.layout_id,
            block.tier,
            block.first_seq,
            block.last_seq,
            block.first_step,
            block.last_step,
            block.rows,
            block.masked,
            block.data.is_not(None).label("raw"),
        ).where(block.job_id.in_(job_ids))
        bounds: list[ColumnElement[bool]] = []
        if from_step > 0:
            bounds.append(block.last_step >= from_step)
        if to_step is not None:
            bounds.append(block.first_step <= to_step)
        if after > 0:
            bounds.append(block.last_seq > after)
        if bounds:
            statement = statement.where(and_(*bounds) | (block.tier == 0))
        statement = statement.order_by(block.job_id, block.last_seq, block.id)
        return (await self._session.execute(statement)).all()

    async def open_blocks(self, job_id: str, attempt: int) -> Sequence[Any]:
        """The blocks of an attempt that are not final, in the order of recording."""
        block = MetricBlock
        statement = (
            select(block.id, block.tier, block.rows, block.layout_id)
            .where(block.job_id == job_id, block.attempt == attempt, block.tier < FINAL)
            .order_by(block.last_seq, block.id)
        )
        return (await self._session.execute(statement)).all()

    async def columns(
        self, layout_ids: Sequence[int], names: Sequence[str] | None
    ) -> dict[int, list[tuple[int, str]]]:
        """For each layout the columns of these names (None: all), and their names."""
        found: dict[int, list[tuple[int, str]]] = {key: [] for key in layout_ids}
        if not layout_ids:
            return found
        each = (
            func.unnest(MetricLayout.names)
            .table_valued(column("name", Text), with_ordinality="place")
            .render_derived(name="each")
        )
        statement = (
            select(MetricLayout.id, each.c.name, each.c.place)
            .join(each, true())
            .where(MetricLayout.id.in_(layout_ids))
            .order_by(MetricLayout.id, each.c.place)
        )
        if names is not None:
            statement = statement.where(each.c.name.in_(names))
        for layout_id, name, place in await self._session.execute(statement):
            found[layout_id].append((place - 1, name))
        return found

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

    async def levels(self, block_ids: Sequence[int]) -> dict[int, list[tuple[int, bytes | None]]]:
        """The levels that blocks have rollups at, each with the places of its columns."""
        found: dict[int, list[tuple[int, bytes | None]]] = {}
        if block_ids:
            statement = select(
                MetricRollup.block_id, MetricRollup.level, MetricRollup.places
            ).where(MetricRollup.block_id.in_(block_ids))
            for block_id, level, places in await self._session.execute(statement):
                found.setdefault(block_id, []).append((level, places))
        return found

    async def slices(self, wanted: Sequence[Slice]) -> list[bytes]:
        """Bytes of blocks' data, in the order asked for."""
        found = [b""] * len(wanted)
        if wanted:
            asked = _unnested(
                place=range(len(wanted)),
                block_id=[one.block_id for one in wanted],
                begin=[one.offset + 1 for one in wanted],
                size=[one.length for one in wanted],
            )
            part = func.substring(
                MetricBlock.data, cast(asked.c.begin, Integer), cast(asked.c.size, Integer)
            )
            statement = select(asked.c.place, type_coerce(part, LargeBinary)).join(
                MetricBlock, MetricBlock.id == asked.c.block_id
            )
            for place, data in await self._session.execute(statement):
                found[place] = data
        return found

    async def buckets(
        self, level: int, block_ids: Sequence[int], columns: Sequence[int]
    ) -> dict[int, tuple[bytes, bytes]]:
        """For blocks and a column of each their rollup at a level: its rows' data, and the data of
        the column. The keys are places in the sequences; those that have no such rollup are not
        there.
        """
        if not block_ids:
            return {}
        asked = _unnested(
            place=range(len(block_ids)),
            block_id=block_ids,
            col=columns,
            # What the columns of a block share is sent once.
            share=[int(n == 0 or block_ids[n - 1] != key) for n, key in enumerate(block_ids)],
        )
        rollup = MetricRollup
        low, high = (
            func.get_byte(rollup.places, cast(asked.c.col * 2 + n, Integer)) for n in range(2)
        )
        column = case((rollup.places.is_(None), asked.c.col), else_=low + 256 * high)
        size = rollup.buckets * STORED.itemsize
        part = func.substring(rollup.data, cast(column * size + 1, Integer), size)
        statement = (
            select(
                asked.c.place,
                rollup.block_id,
                case((asked.c.share == 1, rollup.row_data)),
                type_coerce(part, LargeBinary),
                # 65535 is -1: the column is not there.
                (column < 2**15).label("there"),
            )
            .join(rollup, (rollup.block_id == asked.c.block_id) & (rollup.level == level))
            .order_by(asked.c.place)
        )
        found = {}
        shared: dict[int, bytes] = {}
        for place, block_id, rows, data, there in await self._session.execute(statement):
            if rows is not None:
                shared[block_id] = rows
            if there:
                found[place] = (shared[block_id], data)
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
        for place, name in enumerate(block.names):
            where = of_batch if block.present is None else of_batch & block.present[place]
            steps = rows.steps[where].tolist()
            if steps:
                values = block.values[place][where].tolist()
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
