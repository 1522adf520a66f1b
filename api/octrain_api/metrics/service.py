"""What readers of metrics get. The caller has checked the owner."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octrain_api.metrics.catalogue import Names, TooManyPatterns, read_catalogue
from octrain_api.metrics.lines import Query
from octrain_api.metrics.lookup import Facts, JobHead, MetricLookup, SeriesFacts
from octrain_api.metrics.reading import Found, MetricReader, TooMuch
from octrain_api.metrics.render import Axis
from octrain_api.numbers import encode
from octrain_api.pagination import cursor_value
from octrain_api.problems import Problem, ProblemError, not_found

Form = Literal["points", "buckets"]
DEFAULT_BUCKETS = 1000
_ALL_SEQS = 2**63 - 1


@dataclass(frozen=True)
class Ask:
    """What a reader asks of some jobs."""

    names: Sequence[str] | None
    attempt: int | None
    from_step: int
    to_step: int | None
    max_points: int | None
    form: Form
    axis: Axis


class MetricService:
    """Reads series."""

    def __init__(self, lookup: MetricLookup) -> None:
        self._lookup = lookup

    async def find(
        self, job_ids: Sequence[str], owner: str | None, since: dict[str, int], ask: Ask
    ) -> tuple[list[JobHead], Found]:
        """The jobs, and what makes those of their series that are asked for.

        Problem 404 where this owner sees no such job, 422 where there are too many patterns, or
        the series are too many to be given at once.
        """
        buckets, max_points = None, 0
        if ask.form == "buckets":
            buckets = ask.max_points or DEFAULT_BUCKETS
        elif ask.max_points is not None:
            # Of each bucket up to three points are kept.
            buckets, max_points = max(ask.max_points // 3, 1), ask.max_points
        query = Query(
            names=_names(ask.names),
            attempt=ask.attempt,
            from_step=ask.from_step,
            to_step=ask.to_step,
            since=since,
            buckets=buckets,
            max_points=max_points,
        )
        known = await self._lookup.facts(
            job_ids,
            owner,
            query.names.exact,
            from_step=query.from_step,
            to_step=query.to_step,
            after=min((since.get(job_id, 0) for job_id in job_ids), default=0),
        )
        jobs = [_seen(known, job_id) for job_id in job_ids]
        try:
            return jobs, await MetricReader(self._lookup).read(query, known)
        except TooMuch as error:
            message = f"{error} Ask for fewer max_points, fewer series or a range of steps."
            raise _invalid("/query/max_points", message, "too_many_points") from error

    async def latest(
        self,
        job_id: str,
        owner: str | None,
        names: Sequence[str] | None,
        limit: int,
        cursor: str | None,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The newest value of each metric by name, and the cursor of the next page."""
        wanted = _names(names)
        # Of blocks only those of tier 0: what the others hold stands with the series.
        known = await self._lookup.facts([job_id], owner, wanted.exact, after=_ALL_SEQS)
        _seen(known, job_id)
        found = await read_catalogue(self._lookup, wanted, known)
        newest: dict[str, SeriesFacts] = {}
        for one in sorted(found.facts.values(), key=lambda f: (f.name, f.attempt)):
            newest[one.name] = one
        after = _decode(cursor) if cursor is not None else None
        items = [one for one in newest.values() if after is None or one.name > after]
        page = items[:limit]
        more = len(items) > limit
        shown = [
            {
                "name": one.name,
                "attempt": one.attempt,
                "step": one.last_step,
                "value": encode(one.last_value),
                "first_step": one.first_step,
                "points": one.points,
            }
            for one in page
        ]
        return shown, _encode(page[-1].name) if more else None


def _seen(known: Facts, job_id: str) -> JobHead:
    found = known.jobs.get(job_id)
    if found is None:
        raise not_found("job", job_id)
    return found


def _names(given: Sequence[str] | None) -> Names:
    try:
        return Names(given)
    except TooManyPatterns as error:
        raise _invalid("/query/name", str(error), "too_many_patterns") from error


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([name]).encode()).decode().rstrip("=")


def _decode(cursor: str) -> str:
    try:
        (name,) = cursor_value(cursor)
        if not isinstance(name, str):
            raise ValueError(cursor)
    except (ValueError, TypeError) as error:
        raise _invalid("/query/cursor", "this is not a cursor of this list", "cursor") from error
    return name


def _invalid(pointer: str, message: str, code: str) -> Problem:
    return Problem(
        422,
        "request-invalid",
        "Request not valid",
        message,
        errors=[ProblemError(pointer=pointer, message=message, code=code)],
    )
