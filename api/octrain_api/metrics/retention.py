"""Which metrics are kept: raw points go first, by age or size; rollups outlive them.

Every statement takes a few blocks, passes over those that somebody else holds, and is a transaction
of its own: writers only add blocks and never wait for a sweep.
"""

from typing import Any

from sqlalchemy import TextClause, text

from octrain_api.database import Database
from octrain_api.settings import MetricSettings

# Blocks a transaction. A block is 16 MB at most before compression.
_BATCH = 20

# A stream that would begin before what is gone must know of it: the job's floor rises.
_RAISE_FLOORS = """
    , raised AS (
        UPDATE jobs SET stream_floor = greatest(stream_floor, floors.seq)
        FROM (SELECT job_id, max(last_seq) AS seq FROM gone GROUP BY job_id) AS floors
        WHERE jobs.id = floors.job_id
    )
"""
_BY_AGE = """
    WITH gone AS (
        SELECT id, job_id, last_seq FROM metric_blocks
        WHERE tier = 100 AND created_at < now() - make_interval(secs => :seconds)
        ORDER BY created_at LIMIT :batch FOR UPDATE SKIP LOCKED
    )
"""
_RAW_BY_AGE = _BY_AGE.replace("tier = 100", "tier = 100 AND data IS NOT NULL")
_RAW_BY_SIZE = """
    WITH gone AS (
        SELECT id, job_id, last_seq FROM metric_blocks
        WHERE id IN (
            SELECT id FROM (
                SELECT id, tier, sum(octet_length(data)) OVER (
                    ORDER BY created_at DESC, id DESC
                ) AS newer
                FROM metric_blocks WHERE data IS NOT NULL
            ) AS summed
            WHERE newer > :max_bytes AND tier = 100
        )
        ORDER BY created_at LIMIT :batch FOR UPDATE SKIP LOCKED
    )
"""
_FORGET = "UPDATE metric_blocks SET data = NULL WHERE id IN (SELECT id FROM gone)"
_FORGET_BY_AGE = text(_RAW_BY_AGE + _RAISE_FLOORS + _FORGET)
_FORGET_BY_SIZE = text(_RAW_BY_SIZE + _RAISE_FLOORS + _FORGET)
_DELETE = "DELETE FROM metric_blocks WHERE id IN (SELECT id FROM gone)"
_DROP = text(_BY_AGE + _RAISE_FLOORS + _DELETE)


async def sweep(database: Database, settings: MetricSettings) -> int:
    """Forget what is too old or too much; how many blocks were touched."""
    day = 86_400
    touched = 0
    if settings.rollup_days:
        touched += await _repeat(database, _DROP, seconds=settings.rollup_days * day)
    if settings.raw_days:
        touched += await _repeat(database, _FORGET_BY_AGE, seconds=settings.raw_days * day)
    if settings.raw_max_bytes:
        touched += await _repeat(database, _FORGET_BY_SIZE, max_bytes=settings.raw_max_bytes)
    return touched


async def _repeat(database: Database, statement: TextClause, **values: Any) -> int:
    total = 0
    while True:
        async with database.transaction() as session:
            result: Any = await session.execute(statement, {**values, "batch": _BATCH})
            touched: int = result.rowcount
        total += touched
        if touched < _BATCH:
            return total
