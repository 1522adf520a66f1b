"""Jobs, for callers that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from octrain.client.async_job import AsyncJob
from octrain.client.async_jobs import AsyncJobs
from octrain.client.blocking import iterating, waiting
from octrain.client.errors import OctrainError
from octrain.client.http import drive, iterate
from octrain.client.models import JobData
from octrain.client.session import Session

P = ParamSpec("P")


def _giving_job(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncJob]],
) -> Callable[Concatenate[Any, P], Job]:
    """A method that returns the job that the coroutine gives: ``self`` where it is this one."""

    @wraps(method)
    def wait(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Job:
        given = drive(method(self._twin, *args, **kwargs))
        return self if given is self._twin else Job(given)

    return wait


def _giving_jobs(
    method: Callable[Concatenate[Any, P], AsyncIterator[AsyncJob]],
) -> Callable[Concatenate[Any, P], Iterator[Job]]:
    @wraps(method)
    def each(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Job]:
        for given in iterate(method(self._twin, *args, **kwargs)):
            yield Job(given)

    return each


class Job:
    """A handle of one job. ``data`` is its state when it was last asked for; ``refresh`` asks.

    In a notebook it shows itself with its losses.
    """

    def __init__(self, twin: AsyncJob) -> None:
        self._twin = twin

    @property
    def data(self) -> JobData:
        return self._twin.data

    @property
    def id(self) -> str:
        return self._twin.id

    @property
    def status(self) -> str:
        return self._twin.status

    @property
    def is_final(self) -> bool:
        return self._twin.is_final

    refresh = _giving_job(AsyncJob.refresh)
    cancel = _giving_job(AsyncJob.cancel)
    pause = _giving_job(AsyncJob.pause)
    resume = _giving_job(AsyncJob.resume)
    start = _giving_job(AsyncJob.start)
    edit = _giving_job(AsyncJob.edit)
    clone = _giving_job(AsyncJob.clone)
    wait = _giving_job(AsyncJob.wait)
    delete = waiting(AsyncJob.delete)
    stream = iterating(AsyncJob.stream)
    events = iterating(AsyncJob.events)
    metrics = waiting(AsyncJob.metrics)
    latest_metrics = iterating(AsyncJob.latest_metrics)
    save_metrics = waiting(AsyncJob.save_metrics)
    logs = iterating(AsyncJob.logs)
    follow_logs = iterating(AsyncJob.follow_logs)
    save_log = waiting(AsyncJob.save_log)
    artifacts = waiting(AsyncJob.artifacts)
    artifact = waiting(AsyncJob.artifact)
    download = waiting(AsyncJob.download)
    download_model = waiting(AsyncJob.download_model)
    conversion = waiting(AsyncJob.conversion)
    precision = waiting(AsyncJob.precision)

    def _repr_html_(self) -> str:
        """The notebook's view: as it is now, or as it was last known when no server answers."""
        try:
            if not self.is_final:
                self.refresh()
            drive(self._twin.load_curve())
        except OctrainError:
            pass
        return self._twin._repr_html_()

    def __repr__(self) -> str:
        return repr(self._twin).removeprefix("Async")


class Jobs:
    """``client.jobs``"""

    def __init__(self, session: Session) -> None:
        self._twin = AsyncJobs(session)

    create = _giving_job(AsyncJobs.create)
    validate = waiting(AsyncJobs.validate)
    get = _giving_job(AsyncJobs.get)
    cancel = _giving_job(AsyncJobs.cancel)
    events = iterating(AsyncJobs.events)
    cancel_many = waiting(AsyncJobs.cancel_many)
    metrics = waiting(AsyncJobs.metrics)
    select = iterating(AsyncJobs.select)
    list = _giving_jobs(AsyncJobs.list)
