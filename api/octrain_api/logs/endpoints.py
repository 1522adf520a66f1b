"""Logs over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.jobs.access import VisibleJob
from octrain_api.logs.repository import LogFilter
from octrain_api.logs.schemas import Level, LogPage
from octrain_api.logs.service import LogService, whole_log
from octrain_api.numbers import clean_text
from octrain_api.patterns import comma_separated
from octrain_api.streaming.parameters import invalid

router = APIRouter(prefix="/jobs", tags=["jobs"])


async def _filter(
    level: Annotated[
        list[Annotated[str, Field(json_schema_extra={"pattern": comma_separated(Level)})]] | None,
        Query(description="repeat it, or separate by commas, for several: " + ", ".join(Level)),
    ] = None,
    text: Annotated[
        str | None, Query(min_length=1, max_length=1000, description="in the line, in any case")
    ] = None,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    stream: Annotated[str | None, Query(max_length=32, description="stdout or stderr")] = None,
) -> LogFilter:
    levels = tuple(name for value in level or () for name in value.split(",") if name)
    for name in levels:
        if name not in set(Level):
            raise invalid(
                "/query/level", f"{name!r} is not a level; there are {', '.join(Level)}", "enum"
            )
    wanted = clean_text(text) if text is not None else None
    return LogFilter(levels=levels, text=wanted, attempt=attempt, rank=rank, stream=stream)


FilterDep = Annotated[LogFilter, Depends(_filter)]


@router.get("/{job_id}/logs")
async def read_logs(
    job: VisibleJob,
    session: SessionDep,
    wanted: FilterDep,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    tail: Annotated[
        int | None, Query(ge=1, le=10_000, description="the last lines; alone, without `limit`")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> LogPage:
    """Lines in order: the first after `after`, the last before `before`, or the last of all.

    With filters a page may be short, or empty, before the end of the log: at most 200,000 lines
    are looked through for one page. `next_after` and `next_before` go on from there.
    """
    service = LogService(session, job.id, job.log_lines)
    if tail is not None:
        if after is not None or before is not None:
            raise invalid("/query/tail", "tail goes without after and before", "conflict")
        return await service.backwards(2**62, tail, wanted)
    if before is not None and after is None:
        return await service.backwards(before, limit, wanted)
    return await service.forwards(
        after or 0, before if before is not None else 2**62, limit, wanted
    )


@router.get(
    "/{job_id}/logs/download",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {}}, "description": "The log, line by line"}},
)
async def download_logs(
    job: VisibleJob,
    context: ContextDep,
    wanted: FilterDep,
    timestamps: Annotated[
        bool, Query(description="begin each line with its time (UTC) and its stream")
    ] = False,
) -> StreamingResponse:
    """The whole log so far as a text file, or the lines of it that are asked for."""
    lines = whole_log(context.database, job.id, job.log_lines, wanted, timestamps=timestamps)
    name = f'attachment; filename="{job.id}.log"'
    return StreamingResponse(
        lines,
        media_type="text/plain; charset=utf-8",
        headers={"Content-Disposition": name},
    )
