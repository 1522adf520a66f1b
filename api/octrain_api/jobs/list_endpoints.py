"""The list of jobs over HTTP: narrowed, sorted, in pages that inserts do not shift."""

import base64
import json
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import Field

from octrain_api.auth import Reader
from octrain_api.dependencies import ContextDep
from octrain_api.jobs.reading import LONGEST_TAGS, conditional
from octrain_api.jobs.repository import ORDERS, JobFilter, JobOrder
from octrain_api.jobs.rows import JobRow, JobRows
from octrain_api.jobs.schemas import JobList, JobObject, JobParts
from octrain_api.jobs.transitions import Status
from octrain_api.jobs.views import json_of
from octrain_api.pagination import cursor_value, cut
from octrain_api.patterns import comma_separated
from octrain_api.problems import Problem, ProblemError
from octrain_api.query_names import PREFIX
from octrain_api.times import WrittenTime

router = APIRouter(prefix="/jobs", tags=["jobs"])

_TIMES = ("created_at", "ended_at")
_ORDERS = ", ".join(sorted([*ORDERS, *(f"-{name}" for name in ORDERS)]))


def _refuse(name: str, message: str, code: str = "enum") -> Problem:
    error = ProblemError(pointer=f"/query/{name}", message=message, code=code)
    return Problem(
        422, "request-invalid", "Request not valid", f"{name}: {message}", errors=[error]
    )


async def label_filters(request: Request) -> tuple[tuple[str, str], ...]:
    """`label.KEY=VALUE` of the query."""
    pairs = request.query_params.multi_items()
    return tuple((k.removeprefix("label."), v) for k, v in pairs if k.startswith("label."))


setattr(label_filters, PREFIX, "label.")


def known_statuses(values: list[str] | None, name: str = "status") -> tuple[str, ...]:
    """Statuses, separated by commas or repeated; 422 for others."""
    wanted = tuple(part for value in values or () for part in value.split(",") if part)
    for value in wanted:
        if value not in set(Status):
            raise _refuse(name, f"{value!r} is not a status; there are {', '.join(Status)}")
    return wanted


async def _statuses(
    status: Annotated[
        list[Annotated[str, Field(json_schema_extra={"pattern": comma_separated(Status)})]] | None,
        Query(description="repeat it, or separate by commas, for several: " + ", ".join(Status)),
    ] = None,
) -> tuple[str, ...]:
    return known_statuses(status)


async def _order(
    sort: Annotated[
        str,
        Query(
            max_length=32,
            description=f"one of {_ORDERS}; a minus for descending",
            json_schema_extra={"enum": _ORDERS.split(", ")},
        ),
    ] = "-created_at",
) -> JobOrder:
    order = JobOrder.parse(sort)
    if order.column not in ORDERS:
        raise _refuse("sort", f"{sort!r} is no order; there are {_ORDERS}")
    return order


async def _fields(
    fields: Annotated[
        str | None,
        Query(
            max_length=1000,
            description="only these members of each job, separated by commas",
            json_schema_extra={"pattern": comma_separated(JobObject.model_fields)},
        ),
    ] = None,
) -> set[str] | None:
    if fields is None:
        return None
    wanted = {name.strip() for name in fields.split(",") if name.strip()}
    unknown = sorted(wanted - set(JobObject.model_fields))
    if unknown or not wanted:
        names = ", ".join(JobObject.model_fields)
        what = f"jobs have no {', '.join(unknown)}" if unknown else "name at least one member"
        raise _refuse("fields", f"{what}; there are {names}")
    return wanted | {"id"}


Time = Annotated[
    WrittenTime | None,
    Query(description="RFC 3339; UTC where it has no offset: 2026-01-31T12:00:00Z"),
]


@router.get("", response_model=JobList | JobParts, responses={304: {"description": "Unchanged"}})
async def list_jobs(
    context: ContextDep,
    principal: Reader,
    labels: Annotated[tuple[tuple[str, str], ...], Depends(label_filters)],
    statuses: Annotated[tuple[str, ...], Depends(_statuses)],
    order: Annotated[JobOrder, Depends(_order)],
    fields: Annotated[set[str] | None, Depends(_fields)],
    name: Annotated[str | None, Query(max_length=200, description="exactly this name")] = None,
    q: Annotated[
        str | None, Query(max_length=200, description="part of the name, or the whole id")
    ] = None,
    created_after: Time = None,
    created_before: Time = None,
    ended_after: Time = None,
    ended_before: Time = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=2048)] = None,
    if_none_match: Annotated[str | None, Header(max_length=LONGEST_TAGS)] = None,
) -> Any:
    """Jobs, newest first unless `sort` says otherwise. `label.KEY=VALUE` narrows to that label.

    A page goes on behind the last job of the one before, whatever was added meanwhile. `..._after`
    includes its moment, `..._before` does not.
    """
    job_filter = JobFilter(
        statuses,
        labels,
        name,
        q,
        (aware(created_after), aware(created_before)),
        (aware(ended_after), aware(ended_before)),
    )
    after = _decode(cursor, order) if cursor is not None else None
    owner = principal.visible_owner
    async with context.database.direct() as connection:
        rows = JobRows(connection)
        jobs = await rows.page(owner, job_filter, limit + 1, after, order, fields)
    page = jobs[:limit]
    next_cursor = _encode(page[-1], order) if cut(jobs, limit) else None
    items = ",".join(json_of(job, fields) for job in page)
    body = f'{{"items":[{items}],"next_cursor":{json.dumps(next_cursor)}}}'.encode()
    return conditional(body, f'"{blake2b(body, digest_size=12).hexdigest()}"', if_none_match)


def aware(time: datetime | None) -> datetime | None:
    """UTC for a time without an offset."""
    if time is None or time.tzinfo is not None:
        return time
    return time.replace(tzinfo=UTC)


def _encode(job: JobRow, order: JobOrder) -> str:
    value: datetime | int | str | None = getattr(job, order.column)
    if value is None and order.column == "name":
        value = ""
    shown = value.isoformat() if isinstance(value, datetime) else value
    text = json.dumps([str(order), shown, job.id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(cursor: str, order: JobOrder) -> tuple[Any, str]:
    """The row that a cursor names; 422 for anything that `_encode` did not make in this order."""
    try:
        of, shown, identifier = cursor_value(cursor)
        if of != str(order) or not isinstance(identifier, str):
            raise ValueError(cursor)
        return _value(shown, order), identifier
    except (ValueError, TypeError) as error:
        message = "this is not a cursor of this list in this order"
        raise _refuse("cursor", message, "cursor") from error


def _value(shown: Any, order: JobOrder) -> Any:
    if order.column in _TIMES:
        if shown is None:
            return "infinity"
        time = datetime.fromisoformat(shown)
        if time.tzinfo is None:
            raise ValueError(shown)
        return time
    if order.column == "priority":
        if not isinstance(shown, int) or isinstance(shown, bool) or not -(2**31) <= shown < 2**31:
            raise ValueError(shown)
        return shown
    if not isinstance(shown, str):
        raise ValueError(shown)
    return shown
