"""Logs over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from octrain_api.dependencies import SessionDep
from octrain_api.jobs.access import VisibleJob
from octrain_api.logs.repository import LogRepository
from octrain_api.models import LogChunk

router = APIRouter(prefix="/jobs", tags=["jobs"])


class LogLine(BaseModel):
    """A line of a trainer's output."""

    seq: int = Field(description="number of the line within the job, from 1")
    time: float = Field(description="Unix seconds, by the node's clock")
    stream: str
    attempt: int
    text: str


class LogPage(BaseModel):
    """Lines in order."""

    lines: list[LogLine]
    next_after: int = Field(description="pass it as `after` for what comes next")


def lines_of(chunk: LogChunk) -> list[LogLine]:
    """The lines of a chunk."""
    rows = zip(chunk.times, chunk.streams, chunk.texts, strict=True)
    return [
        LogLine(seq=number, time=time, stream=stream, attempt=chunk.attempt, text=text)
        for number, (time, stream, text) in enumerate(rows, start=chunk.first_line)
    ]


@router.get("/{job_id}/logs")
async def read_logs(
    job: VisibleJob,
    session: SessionDep,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> LogPage:
    """Lines numbered above `after`, in order."""
    # A chunk holds a line at least, so `limit` chunks are enough.
    chunks = await LogRepository(session).chunks_after_line(job.id, after, limit)
    lines = [line for chunk in chunks for line in lines_of(chunk) if line.seq > after][:limit]
    return LogPage(lines=lines, next_after=lines[-1].seq if lines else after)
