"""Metric blocks, their rollups and series in the database."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, select
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
from octrain_api.models import MetricBlock, MetricLayout

# The tier of blocks that are never joined again.
FINAL = 100


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

    async def open_blocks(self, job_id: str, attempt: int) -> Sequence[Any]:
        """The blocks of an attempt that are not final, in the order of recording."""
        block = MetricBlock
        statement = (
            select(block.id, block.tier, block.rows, block.layout_id)
            .where(block.job_id == job_id, block.attempt == attempt, block.tier < FINAL)
            .order_by(block.last_seq, block.first_seq, block.id)
        )
        return (await self._session.execute(statement)).all()

    async def load(self, block_ids: Sequence[int]) -> list[tuple[MetricBlock, Block]]:
        """Whole blocks in the order of recording; without those whose raw points are gone."""
        return await self._load(MetricBlock.id.in_(block_ids))

    async def _load(self, *where: ColumnElement[bool]) -> list[tuple[MetricBlock, Block]]:
        # One statement: between two, blocks could be joined into others.
        statement = (
            select(MetricBlock)
            .where(MetricBlock.data.is_not(None), *where)
            # Of a batch in several blocks, one may be merged with those before it already.
            .order_by(MetricBlock.last_seq, MetricBlock.first_seq, MetricBlock.id)
            .execution_options(populate_existing=True)
        )
        stored = (await self._session.scalars(statement)).all()
        names = await self.layouts(list({block.layout_id for block in stored}))
        # Large ones take a while: other requests run meanwhile.
        return await asyncio.to_thread(
            lambda: [(block, _unpacked(block, names[block.layout_id])) for block in stored]
        )

    async def batches_after(self, job_id: str, after: int, until: int) -> list["BatchSeries"]:
        """The points of the batches numbered in (after, until], by number and name."""
        stored = await self._load(
            MetricBlock.job_id == job_id,
            MetricBlock.last_seq > after,
            MetricBlock.first_seq <= until,
        )
        return await asyncio.to_thread(_by_batch, stored, after, until)


@dataclass(frozen=True)
class BatchSeries:
    """The points of one series in one telemetry batch."""

    seq: int
    name: str
    attempt: int
    steps: list[int]
    values: list[float]


def _by_batch(
    stored: Sequence[tuple[MetricBlock, Block]], after: int, until: int
) -> list[BatchSeries]:
    found = []
    for row, block in stored:
        # A merged block holds the frames of a batch that had several after those of the next, where
        # these were merged first: rows are taken by number, not by place.
        seqs = block.rows.seqs
        wanted = np.flatnonzero((seqs > after) & (seqs <= until))
        wanted = wanted[np.argsort(seqs[wanted], kind="stable")]
        edges = [0, *(np.flatnonzero(np.diff(seqs[wanted])) + 1), len(wanted)]
        for first, past in pairwise(edges):
            if first == past:
                continue
            rows = wanted[first:past]
            seq, steps = int(seqs[rows[0]]), block.rows.steps[rows].tolist()
            values = block.values[:, rows].tolist()
            for place, name in enumerate(block.names):
                if block.present is None:
                    found.append(BatchSeries(seq, name, row.attempt, steps, values[place]))
                    continue
                here = block.present[place, rows].tolist()
                own = list(compress(steps, here))
                if own:
                    own_values = list(compress(values[place], here))
                    found.append(BatchSeries(seq, name, row.attempt, own, own_values))
    return sorted(found, key=lambda batch: (batch.seq, batch.name))


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
