"""Log lines as they are stored and as readers see them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, Field

from octrain_api.models import LogChunk


class Level(StrEnum):
    """What a line says of its weight, lightest first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@dataclass(frozen=True)
class NewLine:
    """A line to be stored: Unix seconds, stream, text, and what the text tells of itself."""

    time: float
    stream: str
    text: str
    level: str | None = None
    rank: int | None = None


class LogLine(BaseModel):
    """A line of a trainer's output."""

    seq: int = Field(description="number of the line within the job, from 1")
    time: float = Field(description="Unix seconds, by the node's clock")
    stream: str = Field(description="stdout or stderr")
    attempt: int
    rank: int | None = Field(default=None, description="the rank that printed it, if it says so")
    level: Level | None = Field(default=None, description="null when the line does not tell")
    text: str


class LogPage(BaseModel):
    """Lines in order."""

    lines: list[LogLine]
    next_after: int = Field(description="pass it as `after` for what comes next")
    next_before: int | None = Field(
        description="pass it as `before` for what came earlier; null at the beginning"
    )
    total_lines: int = Field(description="the number of the newest line of the job")
    first_line: int = Field(
        description="the number of the first line that is still kept: 1, unless old lines have gone"
    )


def lines_of(chunk: LogChunk) -> Iterator[LogLine]:
    """The lines of a chunk."""
    count = len(chunk.texts)
    # Chunks of older versions know neither.
    levels = chunk.levels or [None] * count
    ranks = chunk.ranks or [None] * count
    rows = zip(chunk.times, chunk.streams, levels, ranks, chunk.texts, strict=True)
    for number, (time, stream, level, rank, text) in enumerate(rows, start=chunk.first_line):
        yield LogLine(
            seq=number,
            time=time,
            stream=stream,
            attempt=chunk.attempt,
            rank=rank,
            level=Level(level) if level is not None else None,
            text=text,
        )
