"""Metric batches and blocks in the database."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import compress, pairwise
from typing import Any

import numpy as np
from sqlalchemy import Select, literal, select, union_all
from sqlalchemy.dialects.postgresql import insert
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
from octrain_api.models import MetricBatch, MetricBlock, MetricLayout

# The tier that stands for blocks: what is never joined again.
FINAL = 100


@dataclass(frozen=True)
class StoredMatrix:
    """A row of batches or of blocks, as far as those who read it whole need it."""

    attempt: int
    tier: int
    layout_id: int
    first_seq: int
    last_seq: int
    created_at: datetime
    rows: int
    masked: bool
    row_data: bytes
    directory: bytes
    data: bytes


class MetricRepository:
    """Appends batches, and reads batches and blocks."""

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
        await self._session.execute(insert(MetricBatch), rows)

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
                insert(MetricLayout)
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

    async def open_batches(self, job_id: str, attempt: int) -> Sequence[Any]:
        """The batches of an attempt, in the order of recording."""
        batch = MetricBatch
        statement = (
            select(batch.id, batch.tier, batch.rows, batch.layout_id)
            .where(batch.job_id == job_id, batch.attempt == attempt)
            .order_by(batch.last_seq, batch.first_seq, batch.id)
        )
        return (await self._session.execute(statement)).all()

    async def load(self, batch_ids: Sequence[int]) -> list[tuple[StoredMatrix, Block]]:
        """Whole batches in the order of recording."""
        return await self._load(_matrices(MetricBatch).where(MetricBatch.id.in_(batch_ids)))

    async def _load(self, *parts: Select[Any]) -> list[tuple[StoredMatrix, Block]]:
        # One statement: between two, batches could be joined to blocks.
        rows = (await self._session.execute(union_all(*parts))).all()
        # Of a batch in several matrices, one may be joined with those before it already.
        stored = sorted(
            (StoredMatrix(*row[1:]) for row in sorted(rows, key=lambda row: int(row[0]))),
            key=lambda matrix: (matrix.last_seq, matrix.first_seq),
        )
        names = await self.layouts(list({matrix.layout_id for matrix in stored}))
        # Large ones take a while: other requests run meanwhile.
        return await asyncio.to_thread(
            lambda: [(matrix, _unpacked(matrix, names[matrix.layout_id])) for matrix in stored]
        )

    async def batches_after(self, job_id: str, after: int, until: int) -> list["BatchSeries"]:
        """The points of the telemetry batches numbered in (after, until], by number and name;
        without those whose raw points are gone.
        """
        stored = await self._load(
            *(
                _matrices(table).where(
                    table.job_id == job_id,
                    table.data.is_not(None),
                    table.last_seq > after,
                    table.first_seq <= until,
                )
                for table in (MetricBatch, MetricBlock)
            )
        )
        return await asyncio.to_thread(_by_batch, stored, after, until)


def _matrices(table: type[MetricBatch] | type[MetricBlock]) -> Select[Any]:
    """Ids, and the columns of `StoredMatrix`."""
    tier = MetricBatch.tier if table is MetricBatch else literal(FINAL).label("tier")
    columns = [
        tier if field.name == "tier" else getattr(table, field.name)
        for field in fields(StoredMatrix)
    ]
    return select(table.id, *columns)


@dataclass(frozen=True)
class BatchSeries:
    """The points of one series in one telemetry batch."""

    seq: int
    name: str
    attempt: int
    steps: list[int]
    values: list[float]


def _by_batch(
    stored: Sequence[tuple[StoredMatrix, Block]], after: int, until: int
) -> list[BatchSeries]:
    found = []
    for matrix, block in stored:
        # A block holds the frames of a batch that had several after those of the next, where these
        # were joined first: rows are taken by number, not by place.
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
                    found.append(BatchSeries(seq, name, matrix.attempt, steps, values[place]))
                    continue
                here = block.present[place, rows].tolist()
                own = list(compress(steps, here))
                if own:
                    own_values = list(compress(values[place], here))
                    found.append(BatchSeries(seq, name, matrix.attempt, own, own_values))
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


def _unpacked(stored: StoredMatrix, names: Sequence[str]) -> Block:
    directory = Directory(stored.directory)
    bands = [Band(len(directory.columns(n)), directory.place(n)[1]) for n in range(len(directory))]
    rows = unpack_rows(stored.row_data, stored.rows)
    return unpack(Packed(tuple(names), rows, stored.masked, bands, stored.data))
