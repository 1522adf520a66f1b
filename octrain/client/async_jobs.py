"""All jobs: everything that can be asked of them, written once for both clients."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, TypedDict, Unpack

from octrain.client.async_job import AsyncJob, flag, history, path_of
from octrain.client.frames import Metrics, metrics_of
from octrain.client.models import CancelResult, JobData, JobEvent, JobPart, ValidationReport
from octrain.client.pages import each, items_of
from octrain.client.session import Session

_PLAN_TIMEOUT = 90.0
_MOST_CANCELLED = 500


class JobFilters(TypedDict, total=False):
    """What narrows and sorts jobs: see ``AsyncJobs.list``."""

    status: str | Sequence[str] | None
    name: str | None
    q: str | None
    labels: Mapping[str, str] | None
    created_after: datetime | str | None
    created_before: datetime | str | None
    ended_after: datetime | str | None
    ended_before: datetime | str | None
    sort: str | None


class AsyncJobs:
    """``client.jobs``"""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(
        self,
        spec: Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
        draft: bool = False,
        allow_waiting: bool = False,
    ) -> AsyncJob:
        """Submit a job; it is stored when this returns.

        ``idempotency_key`` (one is made for each call otherwise) makes a repeated call return the
        first one's job. A ``draft`` waits for ``start``. ``allow_waiting`` queues it even if no
        registered node could ever run it. Errors: SpecInvalid (with ``pointers``), NoCapableNode,
        IdempotencyKeyReused, QuotaExceeded.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        params = {"draft": flag(draft), "allow_waiting": flag(allow_waiting)}
        return self._job(
            await self._session.request(
                "POST", "/jobs", json=dict(spec), headers=headers, params=params
            )
        )

    async def validate(self, spec: Mapping[str, Any], *, wait: float = 15) -> ValidationReport:
        """All that can be known of a job before it is submitted; none is stored.

        ``wait`` is how long, in seconds up to 60, to wait for a node's plan of memory and
        conversion.
        """
        answer = await self._session.request(
            "POST",
            "/jobs:validate",
            json=dict(spec),
            params={"wait": wait},
            timeout=_PLAN_TIMEOUT,
            repeatable=True,
        )
        return ValidationReport.model_validate(answer)

    async def get(self, job_id: str) -> AsyncJob:
        """The job with this id. Errors: NotFound."""
        return self._job(await self._session.request("GET", path_of(job_id)))

    async def cancel(self, job_id: str) -> AsyncJob:
        """Ask for the job's end, and return it as it is then. Twice is as good as once."""
        return self._job(await self._session.request("POST", path_of(job_id, "/cancel")))

    async def cancel_many(
        self,
        ids: Sequence[str] | None = None,
        *,
        status: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        every: bool = False,
    ) -> list[CancelResult]:
        """Cancel jobs: those named, or the unfinished ones that all the filters find, or every one.

        A job that could not be cancelled has a ``problem``; the others are cancelled all the same.
        """
        wanted: dict[str, Any] = {
            "ids": list(ids) if ids is not None else None,
            "status": list(status) if status is not None else None,
            "labels": dict(labels) if labels is not None else None,
            "name": name,
            "every": every or None,
        }
        body = {key: value for key, value in wanted.items() if value is not None}
        if ids is not None and len(ids) > _MOST_CANCELLED:
            parts = [ids[n : n + _MOST_CANCELLED] for n in range(0, len(ids), _MOST_CANCELLED)]
            return [result for part in parts for result in await self.cancel_many(part)]
        results: list[CancelResult] = []
        seen: set[str] = set()
        while True:
            answer = await self._session.request("POST", "/jobs:cancel", json=body)
            fresh = [CancelResult.model_validate(item) for item in items_of(answer)]
            fresh = [result for result in fresh if result.job_id not in seen]
            results += fresh
            seen |= {result.job_id for result in fresh}
            if not answer.get("more") or not fresh:
                return results

    async def events(
        self, job_id: str, *, after: int = 0, kinds: Sequence[str] | None = None
    ) -> AsyncIterator[JobEvent]:
        """A job's history so far, oldest first; it outlives the job. Errors: NotFound."""
        async for event in history(self._session, job_id, after, kinds):
            yield event

    def _job(self, answer: Any) -> AsyncJob:
        return AsyncJob(self._session, JobData.model_validate(answer))

    async def metrics(
        self,
        jobs: Sequence[str],
        *names: str,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
        form: str | None = None,
        x: str | None = None,
    ) -> Metrics:
        """The named metrics (or patterns) of several jobs, up to 200, in one call; each series
        tells its ``job_id``. Buckets have the same edges in all of them. Errors: NotFound.

        The options are those of a job's own ``metrics``.
        """
        params = {
            "job": list(jobs),
            "keys": ",".join(names) or None,
            "from_step": from_step,
            "to_step": to_step,
            "max_points": max_points,
            "form": form,
            "x": x,
        }
        answer = await self._session.request("GET", "/metrics/query", params=params)
        return metrics_of(answer["series"])

    async def select(
        self, *fields: str, limit: int | None = None, **filters: Unpack[JobFilters]
    ) -> AsyncIterator[JobPart]:
        """Only these members of jobs (``"status"``, ``"progress"``, ...), with the filters and in
        the order of ``list``: small answers, where a list of many jobs would carry every spec.

        Errors: InvalidRequest for a member that jobs do not have.
        """
        params = _list_params(filters) | {"fields": ",".join(fields)}
        async with aclosing(each(self._session, "/jobs", params, limit, page=500)) as found:
            async for item in found:
                yield JobPart.model_validate(item)

    async def list(
        self, *, limit: int | None = None, **filters: Unpack[JobFilters]
    ) -> AsyncIterator[AsyncJob]:
        """Jobs, the newest first, page by page as they are taken; all of them without ``limit``.

        ``status`` (one or several), ``name``, ``labels``, ``created_after``, ``created_before``,
        ``ended_after`` and ``ended_before`` (a datetime, or RFC 3339) narrow it; ``q`` is a part of
        the name or a whole id; ``sort`` one of ``created_at``, ``ended_at``, ``name``,
        ``priority``, ``status``, with a minus before it for descending.
        """
        async with aclosing(each(self._session, "/jobs", _list_params(filters), limit)) as found:
            async for item in found:
                yield self._job(item)


def _list_params(filters: JobFilters) -> dict[str, Any]:
    status = filters.get("status")
    params: dict[str, Any] = {
        "status": status if status is None or isinstance(status, str) else ",".join(status),
        "name": filters.get("name"),
        "q": filters.get("q"),
        "created_after": _time(filters.get("created_after")),
        "created_before": _time(filters.get("created_before")),
        "ended_after": _time(filters.get("ended_after")),
        "ended_before": _time(filters.get("ended_before")),
        "sort": filters.get("sort"),
    }
    return params | {f"label.{key}": value for key, value in (filters.get("labels") or {}).items()}


def _time(moment: datetime | str | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment
