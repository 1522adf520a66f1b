"""The lines that a job's trainer printed: paged, followed, narrowed, saved."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octrain.client.events import follow
from octrain.client.models import LogLine
from octrain.client.session import Session, with_query

_PAGE = 1000


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted: all that is given must hold. ``text`` is found in any case."""

    levels: Sequence[str] = ()
    text: str | None = None
    attempt: int | None = None
    rank: int | None = None
    stream: str | None = None

    def params(self) -> dict[str, Any]:
        """As the server takes them."""
        return {
            "level": ",".join(self.levels) or None,
            "text": self.text,
            "attempt": self.attempt,
            "rank": self.rank,
            "stream": self.stream,
        }

    def takes(self, line: LogLine) -> bool:
        """Whether a line is wanted."""
        return (
            (not self.levels or line.level in self.levels)
            and (self.text is None or self.text.lower() in line.text.lower())
            and self.attempt in (None, line.attempt)
            and self.rank in (None, line.rank)
            and self.stream in (None, line.stream)
        )


class JobLog:
    """The log of the job at ``path``."""

    def __init__(self, session: Session, path: str, wanted: LogFilter) -> None:
        self._session = session
        self._path = path
        self._wanted = wanted

    async def after(self, number: int, limit: int | None = None) -> AsyncIterator[LogLine]:
        """The wanted lines numbered above ``number`` so far, page by page."""
        taken = 0
        while limit is None or taken < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - taken)
            answer = await self._page({"after": number, "limit": size})
            lines = [LogLine.model_validate(line) for line in answer["lines"]]
            for line in lines:
                yield line
            taken += len(lines)
            following = answer.get("next_after")
            # With a filter a page can be empty before the end.
            if following is None or int(following) == number:
                return
            number = int(following)

    async def tail(self, count: int) -> list[LogLine]:
        """The last ``count`` of the wanted lines."""
        found: list[LogLine] = []
        params: dict[str, Any] = {"tail": min(count, 10_000)}
        while True:
            answer = await self._page(params)
            found = [LogLine.model_validate(line) for line in answer["lines"]] + found
            before = answer.get("next_before")
            if before is None or len(found) >= count:
                return found[-count:]
            params = {"before": before, "limit": min(count - len(found), 10_000)}

    async def follow(self, after: int, event: int) -> AsyncGenerator[LogLine, None]:
        """The wanted lines numbered above ``after`` that the job's stream tells after its number
        ``event``, as they come, until the job has ended."""
        path = with_query(f"{self._path}/stream", {"include": "logs"})
        everything = JobLog(self._session, self._path, LogFilter())
        async with aclosing(follow(self._session, path, after=event)) as events:
            async for told in events:
                if told.type == "log":
                    lines = [LogLine.model_validate(told.data)]
                elif told.type == "reset":
                    lines = [line async for line in everything.after(after)]
                else:
                    continue
                for line in lines:
                    if line.seq > after:
                        after = line.seq
                        if self._wanted.takes(line):
                            yield line

    async def save(self, target: Path) -> Path:
        """Write the wanted lines so far into a file, whole or not at all."""
        path = with_query(f"{self._path}/logs/download", self._wanted.params())
        draft = target.with_name(f".{target.name}.part")
        try:
            async with self._session.stream(path, read_timeout=60.0) as body:
                with draft.open("wb") as out:
                    async for chunk in body.chunks():
                        out.write(chunk)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        return target

    async def _page(self, params: Mapping[str, Any]) -> Any:
        return await self._session.request(
            "GET", f"{self._path}/logs", params={**self._wanted.params(), **params}
        )
