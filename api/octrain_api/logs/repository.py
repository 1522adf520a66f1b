"""Log lines in the database, in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, Integer, Select, Text, column, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.logs.schemas import LogLine, NewLine
from octrain_api.models import Job, LogChunk


@dataclass(frozen=True)
class LogFilter:
    """What lines are narrowed to: all that are given must hold. `text` is found in any case."""

    levels: tuple[str, ...] = ()
    text: str | None = None
    attempt: int | None = None
    rank: int | None = None
    stream: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every line passes."""
        return self == LogFilter()


class LogRepository:
    """Appends and reads log lines. The caller holds the job's row lock when it appends."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(self, job: Job, attempt: int, seq: int, lines: Sequence[NewLine]) -> None:
        """Store lines as the job's number `seq`, and number them within the job."""
        first = job.log_lines + 1
        job.log_lines += len(lines)
        self._session.add(
            LogChunk(
                job_id=job.id,
                first_line=first,
                last_line=job.log_lines,
                seq=seq,
                attempt=attempt,
                times=[line.time for line in lines],
                streams=[line.stream for line in lines],
                levels=[line.level for line in lines],
                ranks=[line.rank for line in lines],
                texts=[line.text for line in lines],
                size=sum(len(line.text.encode()) for line in lines),
            )
        )
        await self._session.flush()

    async def first_line(self, job_id: str) -> int | None:
        """The number of the first line that is still kept; None without any."""
        statement = (
            select(LogChunk.first_line)
            .where(LogChunk.job_id == job_id)
            .order_by(LogChunk.first_line)
            .limit(1)
        )
        return await self._session.scalar(statement)

    async def lines(
        self,
        job_id: str,
        after: int,
        before: int,
        limit: int,
        wanted: LogFilter,
        *,
        from_the_end: bool = False,
    ) -> list[LogLine]:
        """The first (or last) `limit` of the wanted lines numbered in (after, before), in order."""
        lines = (
            func.unnest(
                LogChunk.times, LogChunk.streams, LogChunk.levels, LogChunk.ranks, LogChunk.texts
            )
            .table_valued(
                column("time", Float),
                column("stream", Text),
                column("level", Text),
                column("rank", Integer),
                column("text", Text),
                with_ordinality="place",
            )
            .render_derived(name="lines")
        )
        number = LogChunk.first_line + lines.c.place - 1
        statement = (
            select(
                number.label("seq"),
                lines.c.time,
                lines.c.stream,
                LogChunk.attempt,
                lines.c.rank,
                lines.c.level,
                lines.c.text,
            )
            .select_from(LogChunk)
            .join(lines, number.between(after + 1, before - 1))
            .where(LogChunk.job_id == job_id)
            .where(LogChunk.last_line > after, LogChunk.first_line < before)
            .limit(limit)
        )
        # By the chunk's index, then by the place: the limit stops the read early.
        if from_the_end:
            statement = statement.order_by(LogChunk.last_line.desc(), lines.c.place.desc())
        else:
            statement = statement.order_by(LogChunk.last_line, lines.c.place)
        rows = (await self._session.execute(_narrowed(statement, lines.c, wanted))).mappings().all()
        found = [LogLine.model_validate(dict(row)) for row in rows]
        return found[::-1] if from_the_end else found

    async def chunks_after_seq(self, job_id: str, after: int, until: int) -> Sequence[LogChunk]:
        """The chunks whose stream number lies in (after, until]."""
        statement = (
            select(LogChunk)
            .where(LogChunk.job_id == job_id, LogChunk.seq > after, LogChunk.seq <= until)
            .order_by(LogChunk.seq)
        )
        return (await self._session.scalars(statement)).all()


def _narrowed(statement: Select[Any], line: Any, wanted: LogFilter) -> Select[Any]:
    if wanted.levels:
        statement = statement.where(line.level.in_(wanted.levels))
    if wanted.rank is not None:
        statement = statement.where(line.rank == wanted.rank)
    if wanted.stream is not None:
        statement = statement.where(line.stream == wanted.stream)
    if wanted.attempt is not None:
        statement = statement.where(LogChunk.attempt == wanted.attempt)
    if wanted.text is not None:
        statement = statement.where(line.text.icontains(wanted.text, autoescape=True))
    return statement
