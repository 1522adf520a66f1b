"""Log lines in the database, in chunks."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.models import Job, LogChunk


class LogRepository:
    """Appends and reads log lines. The caller holds the job's row lock when it appends."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(
        self, job: Job, attempt: int, seq: int, lines: Sequence[tuple[float, str, str]]
    ) -> None:
        """Store (time in Unix seconds, stream, text) lines and number them within the job."""
        times, streams, texts = zip(*lines, strict=True)
        first = job.log_lines + 1
        job.log_lines += len(lines)
        self._session.add(
            LogChunk(
                job_id=job.id,
                first_line=first,
                last_line=job.log_lines,
                seq=seq,
                attempt=attempt,
                times=list(times),
                streams=list(streams),
                texts=list(texts),
            )
        )
        await self._session.flush()

    async def chunks_after_line(self, job_id: str, line: int, limit: int) -> Sequence[LogChunk]:
        """Up to `limit` chunks that hold lines numbered above `line`, in order."""
        statement = (
            select(LogChunk)
            .where(LogChunk.job_id == job_id, LogChunk.last_line > line)
            .order_by(LogChunk.last_line)
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def chunks_after_seq(self, job_id: str, after: int, until: int) -> Sequence[LogChunk]:
        """The chunks whose stream number lies in (after, until]."""
        statement = (
            select(LogChunk)
            .where(LogChunk.job_id == job_id, LogChunk.seq > after, LogChunk.seq <= until)
            .order_by(LogChunk.seq)
        )
        return (await self._session.scalars(statement)).all()
