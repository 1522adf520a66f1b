"""The statements that readers of metrics need: few, and of few bytes.

They go to the driver, with no session in between, and in its binary form: bytes come as they are.
A chart's curve takes two of them, one of what is known of the job's metrics and one of the buckets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, NamedTuple

from psycopg.rows import tuple_row

from octrain_api.direct import Connection
from octrain_api.metrics.codec import Directory, Rows, unpack_rows
from octrain_api.metrics.layouts import KnownLayouts, Layout
from octrain_api.metrics.summary import STORED

# What is known of the metrics of jobs, in one row: of each kind of fact the arrays that aggregation
# makes of it, or NULL where there are none. Batches of tier 0 come whatever they hold: no fact of
# theirs stands elsewhere. To a reader a batch is a block as any other, and its number is negative.
_FACTS = """
WITH block AS (
    SELECT -id AS id, job_id, attempt, layout_id, tier, first_seq, last_seq, first_step, last_step,
           rows, masked, true AS raw
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
)
SELECT job.*, blocks.*, layout.*, series.*
FROM (
    SELECT array_agg(id), array_agg(sequence) FROM jobs
    WHERE id = ANY(%(jobs)s) AND deleted_at IS NULL AND owner = coalesce(%(owner)s, owner)
) AS job
CROSS JOIN (
    SELECT array_agg(id), array_agg(array_position(%(jobs)s, job_id)), array_agg(attempt),
           array_agg(layout_id), array_agg(tier), array_agg(first_seq), array_agg(last_seq),
           array_agg(first_step), array_agg(last_step), array_agg(rows), array_agg(masked),
           array_agg(raw)
    FROM (SELECT * FROM block ORDER BY job_id, last_seq, abs(id)) AS sorted
) AS blocks
CROSS JOIN (
    SELECT array_agg(id), array_agg(digest) FROM metric_layouts
    WHERE id IN (SELECT layout_id FROM block)
) AS layout
CROSS JOIN (
    SELECT array_agg(array_position(%(jobs)s, job_id)), array_agg(name), array_agg(attempt),
           array_agg(first_step), array_agg(last_step), array_agg(last_value), array_agg(points)
    FROM metric_series WHERE job_id = ANY(%(jobs)s)"""
_NAMED = " AND name = ANY(%(names)s)"
_END = ") AS series"
_LAYOUTS = "SELECT id, digest, names FROM metric_layouts WHERE id = ANY(%(ids)s::bigint[])"
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


class SeriesFacts(NamedTuple):
    """One metric of one attempt."""

    job_id: str
    name: str
    attempt: int
    first_step: int
    last_step: int
    last_value: float
    points: int


@dataclass(frozen=True)
class Facts:
    """What is known of the metrics of jobs."""

    # The jobs that are there and may be seen.
    jobs: dict[str, JobHead]
    # In the order of recording: those that may hold what is asked for, and all of tier 0.
    blocks: Sequence[BlockFacts]
    # By number; of all the blocks.
    layouts: dict[int, Layout]
    # Those asked for, as far as they are compacted.
    series: Sequence[SeriesFacts]


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
    """Reads what is asked of it by one connection: a transaction of its own makes it one moment."""

    def __init__(self, connection: Connection, layouts: KnownLayouts) -> None:
        self._connection = connection
        self._layouts = layouts

    async def _fetch(self, query: LiteralString, **values: Any) -> list[tuple[Any, ...]]:
        async with self._connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            await cursor.execute(query, values)
            return await cursor.fetchall()

    async def facts(
        self,
        job_ids: Sequence[str],
        owner: str | None,
        names: Sequence[str] | None,
        *,
        from_step: int = 0,
        to_step: int | None = None,
        after: int = 0,
    ) -> Facts:
        """What is known of jobs that this owner (None: any) may see, of the series of these names
        (None: all), and of the blocks that may hold such points.
        """
        jobs = list(job_ids)
        named = {} if names is None else {"names": list(names)}
        (row,) = await self._fetch(
            _FACTS + (_NAMED if named else "") + _END,
            jobs=jobs,
            owner=owner,
            after=after,
            first=from_step,
            last=_NO_STEP if to_step is None else to_step,
            **named,
        )
        arrays: list[Any] = [part or () for part in row]
        ids, sequences = arrays[:2]
        block_ids, block_jobs, *blocks = arrays[2:14]
        layout_ids, digests, series_jobs, *series = arrays[14:]
        heads = [JobHead(*of) for of in zip(ids, sequences, strict=True)]
        return Facts(
            {head.id: head for head in heads},
            [
                BlockFacts(*of)
                for of in zip(block_ids, [jobs[n - 1] for n in block_jobs], *blocks, strict=True)
            ],
            await self._layouts_of(dict(zip(layout_ids, digests, strict=True))),
            [
                SeriesFacts(*of)
                for of in zip([jobs[n - 1] for n in series_jobs], *series, strict=True)
            ],
        )

    async def _layouts_of(self, digests: dict[int, bytes]) -> dict[int, Layout]:
        known = {key: self._layouts.get(digest) for key, digest in digests.items()}
        found = {key: layout for key, layout in known.items() if layout is not None}
        missing = [key for key in digests if key not in found]
        if missing:
            for key, digest, names in await self._fetch(_LAYOUTS, ids=_array(missing)):
                found[key] = self._layouts.keep(digest, names)
        return found

    async def stats(self, block_ids: Sequence[int]) -> dict[int, bytes]:
        """The column statistics of blocks of tier 0."""
        if not block_ids:
            return {}
        return dict(await self._fetch(_STATS, batches=_array(-key for key in block_ids)))

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
