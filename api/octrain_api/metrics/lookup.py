"""The statements that readers of metrics need: few, and of few bytes.

They go to the session's own connection, in its transaction, but by the driver and in its binary
form: bytes come as they are, and a chart's few statements cost a third.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, NamedTuple

from psycopg.rows import tuple_row
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import psycopg_of
from octrain_api.direct import Connection
from octrain_api.metrics.codec import Directory, Rows, unpack_rows
from octrain_api.metrics.summary import STORED

_JOB = """
SELECT id, sequence FROM jobs
WHERE id = %(job)s AND deleted_at IS NULL AND owner = coalesce(%(owner)s, owner)
"""
# Batches of tier 0 come whatever they hold: no fact of theirs stands elsewhere. To a reader a batch
# is a block as any other, and its number is negative.
_BLOCKS = """
SELECT -id AS id, job_id, attempt, layout_id, tier, first_seq, last_seq, first_step, last_step,
       rows, masked, true
FROM metric_batches
WHERE job_id = ANY(%(jobs)s)
  AND (tier = 0 OR (last_seq > %(after)s AND last_step >= %(first)s
                    AND first_step <= %(last)s))
UNION ALL
SELECT id, job_id, attempt, layout_id, 100, first_seq, last_seq, first_step, last_step,
       rows, masked, data IS NOT NULL
FROM metric_blocks
WHERE job_id = ANY(%(jobs)s) AND last_seq > %(after)s AND last_step >= %(first)s
  AND first_step <= %(last)s
"""
_SERIES = """
SELECT job_id, name, attempt, first_step, last_step, last_value, points
FROM metric_series WHERE job_id = ANY(%(jobs)s)
"""
_NAMED = " AND name = ANY(%(names)s)"
_LAYOUTS = "SELECT id, names FROM metric_layouts WHERE id = ANY(%(ids)s::bigint[])"
_COLUMNS = """
SELECT layout.id, each.place - 1, each.name
FROM metric_layouts AS layout
CROSS JOIN LATERAL unnest(layout.names) WITH ORDINALITY AS each(name, place)
WHERE layout.id = ANY(%(ids)s::bigint[]) AND each.name = ANY(%(names)s)
ORDER BY layout.id, each.place
"""
_STATS = "SELECT -id, stats FROM metric_batches WHERE id = ANY(%(batches)s::bigint[])"
_ROWS = """
SELECT -id, rows, row_data, directory FROM metric_batches WHERE id = ANY(%(batches)s::bigint[])
UNION ALL
SELECT id, rows, row_data, directory FROM metric_blocks WHERE id = ANY(%(blocks)s::bigint[])
"""
_LEVELS = """
SELECT block_id, level, places FROM metric_rollups WHERE block_id = ANY(%(ids)s::bigint[])
"""
_SLICES = """
SELECT asked.place, substring(block.data FROM asked.begin::int FOR asked.size::int)
FROM unnest(%(places)s::bigint[], %(ids)s::bigint[], %(begins)s::bigint[], %(sizes)s::bigint[])
     AS asked(place, id, begin, size)
CROSS JOIN LATERAL (
    SELECT data FROM metric_batches WHERE id = -asked.id
    UNION ALL
    SELECT data FROM metric_blocks WHERE id = asked.id
) AS block
"""
# A rollup's data hold a column's buckets together, at the place that `places` gives it in two
# bytes; 65535 is none. What the columns of a block share is sent once.
_BUCKETS = """
SELECT asked.place, rollup.block_id, CASE WHEN asked.share = 1 THEN rollup.row_data END,
       own.place < 32768,
       substring(rollup.data FROM own.place * own.size + 1 FOR own.size)
FROM unnest(%(places)s::bigint[], %(ids)s::bigint[], %(columns)s::int[], %(share)s::int[])
     AS asked(place, id, col, share)
JOIN metric_rollups AS rollup ON rollup.block_id = asked.id AND rollup.level = %(level)s
CROSS JOIN LATERAL (
    SELECT CASE WHEN rollup.places IS NULL THEN asked.col
                ELSE get_byte(rollup.places, asked.col * 2)
                     + 256 * get_byte(rollup.places, asked.col * 2 + 1) END AS place,
           rollup.buckets * %(bytes)s::int AS size
) AS own
ORDER BY asked.place
"""
_NO_STEP = 2**63 - 1


class JobHead(NamedTuple):
    """What readers of metrics need of a job: its id, and its newest number."""

    id: str
    sequence: int


class BlockFacts(NamedTuple):
    """What is known of a block, or a batch, without its points."""

    id: int
    job_id: str
    attempt: int
    layout_id: int
    tier: int
    first_seq: int
    last_seq: int
    first_step: int
    last_step: int
    rows: int
    masked: bool
    # Whether its points are still there.
    raw: bool


@dataclass(frozen=True)
class Slice:
    """Some bytes of a block's data."""

    block_id: int
    offset: int
    length: int


def _array(numbers: Iterable[int]) -> str:
    """An array of whole numbers as Postgres spells it: the driver looks at each element thrice."""
    return "{" + ",".join(map(str, numbers)) + "}"


class MetricLookup:
    """Reads what is asked of it in the session's transaction, for as long as that is open."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._driver: Connection | None = None

    async def _fetch(self, query: LiteralString, **values: Any) -> list[tuple[Any, ...]]:
        if self._driver is None:
            self._driver = await psycopg_of(self._session)
        async with self._driver.cursor(binary=True, row_factory=tuple_row) as cursor:
            await cursor.execute(query, values)
            return await cursor.fetchall()

    async def job(self, job_id: str, owner: str | None) -> JobHead | None:
        """The job, if it is there and this owner (None: any) may see it."""
        rows = await self._fetch(_JOB, job=job_id, owner=owner)
        return JobHead(*rows[0]) if rows else None

    async def blocks(
        self,
        job_ids: Sequence[str],
        *,
        from_step: int = 0,
        to_step: int | None = None,
        after: int = 0,
    ) -> list[BlockFacts]:
        """The blocks that may hold such points, and all of tier 0, in the order of recording."""
        last = _NO_STEP if to_step is None else to_step
        found = await self._fetch(
            _BLOCKS, jobs=list(job_ids), after=after, first=from_step, last=last
        )
        blocks = [BlockFacts(*row) for row in found]
        return sorted(blocks, key=lambda block: (block.job_id, block.last_seq, abs(block.id)))

    async def series(
        self, job_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[tuple[Any, ...]]:
        """The compacted series of jobs (`names` None: all): job, name, attempt, first step, last
        step, newest value, points.
        """
        if names is None:
            return await self._fetch(_SERIES, jobs=list(job_ids))
        return await self._fetch(_SERIES + _NAMED, jobs=list(job_ids), names=list(names))

    async def columns(
        self, layout_ids: Sequence[int], names: Sequence[str] | None
    ) -> dict[int, list[tuple[int, str]]]:
        """For each layout the columns of these names (None: all), and their names."""
        found: dict[int, list[tuple[int, str]]] = {key: [] for key in layout_ids}
        if not layout_ids:
            return found
        if names is None:
            for layout_id, every in await self._fetch(_LAYOUTS, ids=list(layout_ids)):
                found[layout_id] = list(enumerate(every))
            return found
        rows = await self._fetch(_COLUMNS, ids=list(layout_ids), names=list(names))
        for layout_id, place, name in rows:
            found[layout_id].append((place, name))
        return found

    async def stats(self, block_ids: Sequence[int]) -> dict[int, bytes]:
        """The column statistics of blocks of tier 0."""
        if not block_ids:
            return {}
        return dict(await self._fetch(_STATS, batches=[-key for key in block_ids]))

    async def rows(self, block_ids: Sequence[int]) -> dict[int, tuple[Rows, Directory]]:
        """What the rows of blocks share, and where their bands lie."""
        if not block_ids:
            return {}
        return {
            key: (unpack_rows(row_data, count), Directory(directory))
            for key, count, row_data, directory in await self._fetch(
                _ROWS,
                batches=[-key for key in block_ids if key < 0],
                blocks=[key for key in block_ids if key > 0],
            )
        }

    async def levels(self, block_ids: Sequence[int]) -> dict[int, list[tuple[int, bytes | None]]]:
        """The levels that blocks have rollups at, each with the places of its columns."""
        found: dict[int, list[tuple[int, bytes | None]]] = {}
        if block_ids:
            for block_id, level, places in await self._fetch(_LEVELS, ids=list(block_ids)):
                found.setdefault(block_id, []).append((level, places))
        return found

    async def slices(self, wanted: Sequence[Slice]) -> list[bytes]:
        """Bytes of blocks' data, in the order asked for."""
        found = [b""] * len(wanted)
        if wanted:
            rows = await self._fetch(
                _SLICES,
                places=_array(range(len(wanted))),
                ids=_array(one.block_id for one in wanted),
                begins=_array(one.offset + 1 for one in wanted),
                sizes=_array(one.length for one in wanted),
            )
            for place, data in rows:
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
        rows = await self._fetch(
            _BUCKETS,
            level=level,
            places=_array(range(len(block_ids))),
            ids=_array(block_ids),
            columns=_array(columns),
            share=_array(int(n == 0 or block_ids[n - 1] != key) for n, key in enumerate(block_ids)),
            bytes=STORED.itemsize,
        )
        found = {}
        shared: dict[int, bytes] = {}
        for place, block_id, row_data, there, data in rows:
            if row_data is not None:
                shared[block_id] = row_data
            if there:
                found[place] = (shared[block_id], data)
        return found
