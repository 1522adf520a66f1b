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

_FORGET_BY_AGE = text(
    """
    UPDATE metric_blocks SET data = NULL WHERE id IN (
        SELECT id FROM metric_blocks
        WHERE tier = 100 AND data IS NOT NULL
          AND created_at < now() - make_interval(secs => :seconds)
        ORDER BY created_at LIMIT :batch FOR UPDATE SKIP LOCKED
    )
    """
)
_FORGET_BY_SIZE = text(
    """
    UPDATE metric_blocks SET data = NULL WHERE id IN (
        SELECT id FROM metric_blocks
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
)
_DROP = text(
    """
    DELETE FROM metric_blocks WHERE id IN (
        SELECT id FROM metric_blocks
        WHERE tier = 100 AND created_at < now() - make_interval(secs => :seconds)
        ORDER BY created_at LIMIT :batch FOR UPDATE SKIP LOCKED
    )
    """
)


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
