"""Which metrics are kept: raw points go first, by age or size; rollups outlive them.

A few blocks at a time, each time in a transaction of its own that passes over what somebody else
holds. Writers only add batches and never wait for a sweep; what is still a batch is too young.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, TextClause, text

from octrain_api.database import Database
from octrain_api.jobs.floors import raise_floors
from octrain_api.settings import MetricSettings

# Blocks a transaction. A block is 32 MB at most before compression.
_BATCH = 20
_DAY = 86_400

_RAW_BY_AGE = text("""
    SELECT id, job_id, last_seq FROM metric_blocks
    WHERE data IS NOT NULL AND created_at < now() - make_interval(secs => :seconds)
    ORDER BY created_at LIMIT :batch
""")
_ALL_BY_AGE = text("""
    SELECT id, job_id, last_seq FROM metric_blocks
    WHERE created_at < now() - make_interval(secs => :seconds)
    ORDER BY created_at LIMIT :batch
""")
# The sizes stand in the rows; no data are read for them.
_RAW_BY_SIZE = text("""
    SELECT id, job_id, last_seq FROM (
        SELECT id, job_id, last_seq, created_at, sum(octet_length(data)) OVER (
            ORDER BY created_at DESC, id DESC
        ) AS newer
        FROM metric_blocks WHERE data IS NOT NULL
    ) AS summed
    WHERE newer > :max_bytes - (
        SELECT coalesce(sum(octet_length(data)), 0) FROM metric_batches
    )
    ORDER BY created_at LIMIT :batch
""")
_FORGET = text("""
    UPDATE metric_blocks SET data = NULL
    WHERE id IN (SELECT id FROM metric_blocks WHERE id = ANY(:ids) FOR UPDATE SKIP LOCKED)
""")
_DROP = text("""
    DELETE FROM metric_blocks
    WHERE id IN (SELECT id FROM metric_blocks WHERE id = ANY(:ids) FOR UPDATE SKIP LOCKED)
""")


async def sweep(database: Database, settings: MetricSettings) -> int:
    """Forget what is too old or too much; how many blocks were touched."""
    touched = 0
    if settings.rollup_days:
        seconds = settings.rollup_days * _DAY
        touched += await _repeat(database, _ALL_BY_AGE, _DROP, seconds=seconds)
    if settings.raw_days:
        seconds = settings.raw_days * _DAY
        touched += await _repeat(database, _RAW_BY_AGE, _FORGET, seconds=seconds)
    if settings.raw_max_bytes:
        most = settings.raw_max_bytes
        touched += await _repeat(database, _RAW_BY_SIZE, _FORGET, max_bytes=most)
    return touched


async def _repeat(
    database: Database, chosen: TextClause, action: TextClause, **values: float
) -> int:
    total = 0
    while True:
        async with database.session() as session:
            found = (await session.execute(chosen, {**values, "batch": _BATCH})).all()
        await raise_floors(database, _floors(found))
        async with database.transaction() as session:
            result: Any = await session.execute(action, {"ids": [row.id for row in found]})
            touched: int = result.rowcount
        total += touched
        if len(found) < _BATCH or not touched:
            return total


def _floors(found: Sequence[Row[Any]]) -> dict[str, int]:
    floors: dict[str, int] = {}
    for row in found:
        floors[row.job_id] = max(row.last_seq, floors.get(row.job_id, 0))
    return floors
