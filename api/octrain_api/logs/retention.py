"""Which log lines are kept: the oldest go by age, and while those of all jobs take too much.

A few chunks at a time, each time in a transaction of its own that passes over what somebody else
holds. Writers only add chunks and never wait for a sweep.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, func, select, text

from octrain_api.database import Database, seconds
from octrain_api.jobs.floors import raise_floors
from octrain_api.models import LogChunk
from octrain_api.settings import JobLogSettings

# Chunks that are chosen at one time.
_BATCH = 500
_DAY = 86_400
# Chunks of a job go from its first line on, so that what is left of a log has no holes, though of
# two transactions the later may have begun earlier.
_DELETE = text("""
    DELETE FROM log_chunks WHERE (job_id, first_line) IN (
        SELECT job_id, first_line FROM log_chunks
        WHERE job_id = :job_id AND first_line <= :line
        FOR UPDATE SKIP LOCKED
    )
""")


async def sweep(database: Database, settings: JobLogSettings) -> int:
    """Forget what is too old or too much; how many chunks went."""
    gone = 0
    if settings.keep_days:
        while True:
            found = await _oldest(database, settings.keep_days * _DAY)
            touched = await _forget(database, found)
            gone += touched
            if len(found) < _BATCH or not touched:
                break
    if settings.max_bytes:
        gone += await _forget_excess(database, settings.max_bytes)
    return gone


async def _forget_excess(database: Database, most: int) -> int:
    async with database.session() as session:
        excess = (await session.scalar(select(func.sum(LogChunk.size))) or 0) - most
    gone = 0
    while excess > 0:
        chosen = []
        for row in await _oldest(database, 0.0):
            if excess <= 0:
                break
            chosen.append(row)
            excess -= row.size
        touched = await _forget(database, chosen)
        gone += touched
        if not touched:
            break
    return gone


async def _oldest(database: Database, age: float) -> Sequence[Row[str, int, int, int]]:
    """The oldest chunks of more than so many seconds."""
    statement = (
        select(LogChunk.job_id, LogChunk.first_line, LogChunk.seq, LogChunk.size)
        .where(LogChunk.created_at <= func.now() - seconds(age))
        .order_by(LogChunk.created_at)
        .limit(_BATCH)
    )
    async with database.session() as session:
        return (await session.execute(statement)).all()


async def _forget(database: Database, chunks: Sequence[Row[str, int, int, int]]) -> int:
    """Remove these chunks and those before them in their jobs; how many there were."""
    lines: dict[str, int] = {}
    floors: dict[str, int] = {}
    for chunk in chunks:
        lines[chunk.job_id] = max(chunk.first_line, lines.get(chunk.job_id, 0))
        floors[chunk.job_id] = max(chunk.seq, floors.get(chunk.job_id, 0))
    await raise_floors(database, floors)
    gone = 0
    for job_id, line in lines.items():
        async with database.transaction() as session:
            result: Any = await session.execute(_DELETE, {"job_id": job_id, "line": line})
            gone += result.rowcount
    return gone
