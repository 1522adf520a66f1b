"""Pages of log lines, and whole logs, without ever holding more than a page of one."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.logs.repository import LogFilter, LogRepository
from octrain_api.logs.schemas import LogLine, LogPage

# Lines that one request looks at when it is to find some of them.
SCANNED = 200_000
# Lines of a download that are read at once: a line has 16 KiB at most.
_READ = 1000


class Sessions(Protocol):
    """What opens a session."""

    def session(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A session."""
        ...


class LogService:
    """Reads the logs of a job. The caller has checked the owner."""

    def __init__(self, session: AsyncSession, job_id: str, total: int) -> None:
        self._logs = LogRepository(session)
        self._job_id = job_id
        self._total = total

    async def forwards(self, after: int, before: int, limit: int, wanted: LogFilter) -> LogPage:
        """The first lines numbered in (after, before)."""
        first = await self.first_line()
        after = max(after, first - 1)
        end = min(before, self._total + 1)
        if not wanted.is_empty:
            end = min(end, after + SCANNED + 1)
        lines = await self._logs.lines(self._job_id, after, end, limit, wanted)
        looked_at = lines[-1].seq if len(lines) == limit else max(end - 1, after)
        return LogPage(
            lines=lines,
            next_after=looked_at,
            next_before=after + 1 if after >= first else None,
            total_lines=self._total,
            first_line=first,
        )

    async def backwards(self, before: int, limit: int, wanted: LogFilter) -> LogPage:
        """The last lines numbered below `before`."""
        first = await self.first_line()
        end = min(before, self._total + 1)
        start = first - 1
        if not wanted.is_empty:
            start = max(end - 1 - SCANNED, start)
        lines = await self._logs.lines(self._job_id, start, end, limit, wanted, from_the_end=True)
        looked_at = lines[0].seq if len(lines) == limit else start + 1
        return LogPage(
            lines=lines,
            next_after=max(end - 1, 0),
            next_before=looked_at if looked_at > first else None,
            total_lines=self._total,
            first_line=first,
        )

    async def first_line(self) -> int:
        """The number of the first line that is kept; without any that of the next to come."""
        return await self._logs.first_line(self._job_id) or self._total + 1


async def whole_log(
    sessions: Sessions, job_id: str, total: int, wanted: LogFilter, *, timestamps: bool
) -> AsyncIterator[bytes]:
    """The lines up to number `total` as text. No connection is held while a slow reader reads."""
    async with sessions.session() as session:
        after = await LogService(session, job_id, total).first_line() - 1
    if after > 0:
        yield f"[... {after:,} lines before this one are no longer kept ...]\n".encode()
    while after < total:
        async with sessions.session() as session:
            page = await LogService(session, job_id, total).forwards(
                after, total + 1, _READ, wanted
            )
        after = page.next_after
        if page.lines:
            yield "".join(_text(line, timestamps) for line in page.lines).encode()


def _text(line: LogLine, timestamps: bool) -> str:
    if not timestamps:
        return f"{line.text}\n"
    try:
        when = datetime.fromtimestamp(line.time, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        # Beyond the years that have a date: a node tells the time, and may tell any.
        when = f"{line.time:g}s"
    return f"{when} {line.stream} {line.text}\n"
