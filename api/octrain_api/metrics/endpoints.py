"""Metrics over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from octrain_api.auth import Principal, Reader
from octrain_api.dependencies import Context, ContextDep
from octrain_api.metrics.catalogue import MOST_PATTERNS
from octrain_api.metrics.lookup import MetricLookup
from octrain_api.metrics.reading import Found
from octrain_api.metrics.render import (
    ARROW_TYPE,
    CSV_TYPE,
    Axis,
    arrow_of,
    csv_of,
    json_answer,
    json_of,
)
from octrain_api.metrics.schemas import JobsSeries, LatestPage, SeriesList
from octrain_api.metrics.service import Ask, Form, MetricService
from octrain_api.problems import Problem, ProblemError

router = APIRouter(tags=["jobs"])

MAX_STEP = 2**62
# Python reads a number of thousands of digits slowly, or not at all.
_DIGITS = 20
# Cells of an answer that is made on the spot: a millisecond or two.
_EFFORT_AT_ONCE = 20_000
# Large answers are made two at a time, which bounds their memory, in threads of their own: what
# nodes send is unpacked in those of all, and does not wait for readers.
_MAKERS = ThreadPoolExecutor(2, thread_name_prefix="metrics")
# Bytes that are handed to the connection at once; more are sent as it takes them.
_CHUNK = 1 << 20
Format = Literal["json", "csv", "arrow"]

_NAMES = (
    "a name, or a pattern with `*`, `?` or `[...]`, such as `fp8/*/amax`; all without. "
    f"{MOST_PATTERNS} patterns at most"
)
Names = Annotated[list[str] | None, Query(max_length=10_000, description=_NAMES)]


async def ask_of(
    name: Names = None,
    keys: Annotated[
        str | None, Query(max_length=65_536, description="the same, separated by commas")
    ] = None,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    from_step: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
    max_points: Annotated[
        int | None,
        Query(
            ge=3,
            le=1_000_000,
            description="of each series; the least, greatest and last of each bucket are kept, or "
            "with form=buckets so many buckets are made (1000 without)",
        ),
    ] = None,
    form: Annotated[Form, Query(description="points, or buckets with min, max, mean, ...")] = (
        "points"
    ),
    x: Annotated[
        Axis,
        Query(
            description="what a point's first number is: the step, the time in seconds since the "
            "epoch, or the tokens; of thinned points that of the bucket's last"
        ),
    ] = "step",
) -> Ask:
    """What is asked of each job."""
    names = list(name or [])
    names += [key for key in (keys or "").split(",") if key]
    asked = names if name is not None or keys is not None else None
    return Ask(asked, attempt, from_step, to_step, max_points, form, x)


AskDep = Annotated[Ask, Depends(ask_of)]
FormatQuery = Annotated[
    Format | None,
    Query(alias="format", description="without it what `Accept` names, or JSON"),
]
Since = Annotated[int, Query(ge=0, le=MAX_STEP, description="the `cursor` of an earlier answer")]
_TYPES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/csv": {"schema": {"type": "string"}},
            ARROW_TYPE: {"schema": {"type": "string", "format": "binary"}},
        }
    }
}


@router.get("/jobs/{job_id}/metrics", response_model=SeriesList, responses=_TYPES)
async def read_metrics(
    request: Request,
    job_id: str,
    context: ContextDep,
    principal: Reader,
    ask: AskDep,
    since: Since = 0,
    wanted: FormatQuery = None,
) -> Response:
    """Series of the job. A step that a later attempt repeated is shown as the later one had it."""
    return await series_of(request, context, principal, job_id, ask, since, wanted)


async def series_of(
    request: Request,
    context: Context,
    principal: Principal,
    job_id: str,
    ask: Ask,
    since: int,
    wanted: Format | None,
) -> Response:
    """The series of a job, for whoever has found out what is asked for."""
    async with _metrics(context) as metrics:
        (job,), found = await metrics.find([job_id], principal.visible_owner, {job_id: since}, ask)
    return await _respond(request, wanted, found, ask, {"cursor": job.sequence})


@router.get("/jobs/{job_id}/metrics/latest", response_model=LatestPage)
async def read_latest_metrics(
    job_id: str,
    context: ContextDep,
    principal: Reader,
    name: Names = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 2000,
    cursor: Annotated[str | None, Query(max_length=4096)] = None,
) -> Response:
    """The metrics of the job by name, each with its newest value."""
    async with _metrics(context) as metrics:
        items, after = await metrics.latest(job_id, principal.visible_owner, name, limit, cursor)
    body = json_of({"items": items, "next_cursor": after})
    return Response(body, media_type="application/json")


@router.get("/metrics/query", response_model=JobsSeries, responses=_TYPES)
async def query_metrics(
    request: Request,
    context: ContextDep,
    principal: Reader,
    ask: AskDep,
    job: Annotated[list[str], Query(min_length=1, max_length=200, description="a job's id")],
    since: Annotated[
        list[str] | None,
        Query(max_length=200, description="JOB:NUMBER, the cursor of a job from an earlier answer"),
    ] = None,
    wanted: FormatQuery = None,
) -> Response:
    """Series of several jobs. Their buckets are of one width, with the same edges."""
    job_ids = list(dict.fromkeys(job))
    async with _metrics(context) as metrics:
        jobs, found = await metrics.find(
            job_ids, principal.visible_owner, _cursors(since or []), ask
        )
    cursors = {head.id: head.sequence for head in jobs}
    return await _respond(request, wanted, found, ask, {"cursors": cursors})


@asynccontextmanager
async def _metrics(context: Context) -> AsyncIterator[MetricService]:
    """A service that sees one moment: between two, batches could be joined to blocks. The answer is
    made when the connection is free again.
    """
    async with context.database.direct_snapshot() as connection:
        yield MetricService(MetricLookup(connection, context.layouts))


def _cursors(since: Sequence[str]) -> dict[str, int]:
    found = {}
    for text in since:
        job_id, separator, number = text.rpartition(":")
        is_number = number.isascii() and number.isdecimal() and len(number) < _DIGITS
        if not separator or not is_number or int(number) > MAX_STEP:
            message = f"{text[:80]!r} is not JOB:NUMBER, such as {job_id[:40] or 'job_...'}:12"
            raise Problem(
                422,
                "request-invalid",
                "Request not valid",
                message,
                errors=[ProblemError(pointer="/query/since", message=message, code="cursor")],
            )
        found[job_id] = int(number)
    return found


async def _respond(
    request: Request, wanted: Format | None, found: Found, ask: Ask, rest: dict[str, Any]
) -> Response:
    """What was found in the format asked for. A large answer is made while others are served."""
    accepted = request.headers.get("accept", "")
    if wanted is None:
        wanted = "json"
        if "text/csv" in accepted:
            wanted = "csv"
        elif ARROW_TYPE in accepted:
            wanted = "arrow"

    def make() -> tuple[list[bytes], str]:
        lines, buckets = found.lines(), ask.form == "buckets"
        if wanted == "csv":
            return _chunks([csv_of(lines, buckets)]), CSV_TYPE
        if wanted == "arrow":
            return _chunks([arrow_of(lines, buckets)]), ARROW_TYPE
        return _chunks(json_answer(lines, buckets, ask.axis, rest)), "application/json"

    if found.effort < _EFFORT_AT_ONCE:
        chunks, media_type = make()
    else:
        chunks, media_type = await asyncio.get_running_loop().run_in_executor(_MAKERS, make)
    if len(chunks) == 1:
        return Response(chunks[0], media_type=media_type)
    headers = {"Content-Length": str(sum(map(len, chunks)))}
    return StreamingResponse(_one_by_one(chunks), media_type=media_type, headers=headers)


def _chunks(pieces: Iterable[bytes]) -> list[bytes]:
    """The same bytes in few chunks, of which each is sent in a moment."""
    chunks: list[bytes] = []
    some: list[bytes] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            whole = b"".join(some)
            chunks += [whole[start : start + _CHUNK] for start in range(0, size, _CHUNK)]
            some, size = [], 0
    if some or not chunks:
        chunks.append(b"".join(some))
    return chunks


async def _one_by_one(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
