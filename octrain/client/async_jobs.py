"""Jobs: everything that can be asked of them, written once for both clients."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from octrain.client.curves import job_html
from octrain.client.downloads import OnProgress, download_archive, download_artifact
from octrain.client.errors import JobFailed, NotFound, OctrainError, WaitTimeout
from octrain.client.events import follow
from octrain.client.frames import Metrics, metrics_of
from octrain.client.logs import JobLog, LogFilter
from octrain.client.models import (
    Artifact,
    CancelResult,
    JobData,
    JobEvent,
    LogLine,
    MetricValue,
    Series,
    StreamEvent,
    ValidationReport,
)
from octrain.client.pages import each, items_of
from octrain.client.session import Session, with_query

# The server holds a long poll at most this long.
LONG_POLL_SECONDS = 30
_POLL_PAUSE = 0.5
_PLAN_TIMEOUT = 90.0
_CSV, _ARROW = "text/csv", "application/vnd.apache.arrow.stream"


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
        params = {"draft": _flag(draft), "allow_waiting": _flag(allow_waiting)}
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
        return self._job(await self._session.request("GET", _path(job_id)))

    async def cancel(self, job_id: str) -> AsyncJob:
        """Ask for the job's end, and return it as it is then. Twice is as good as once."""
        return self._job(await self._session.request("POST", _path(job_id, "/cancel")))

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

    def _job(self, answer: Any) -> AsyncJob:
        return AsyncJob(self._session, JobData.model_validate(answer))

    async def list(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | None = None,
        q: str | None = None,
        labels: Mapping[str, str] | None = None,
        created_after: datetime | str | None = None,
        created_before: datetime | str | None = None,
        ended_after: datetime | str | None = None,
        ended_before: datetime | str | None = None,
        sort: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[AsyncJob]:
        """Jobs, the newest first, page by page as they are taken; all of them without ``limit``.

        ``q`` is a part of the name or a whole id; ``sort`` one of ``created_at``, ``ended_at``,
        ``name``, ``priority``, ``status``, with a minus before it for descending.
        """
        params: dict[str, Any] = {
            "status": status if status is None or isinstance(status, str) else ",".join(status),
            "name": name,
            "q": q,
            "created_after": _time(created_after),
            "created_before": _time(created_before),
            "ended_after": _time(ended_after),
            "ended_before": _time(ended_before),
            "sort": sort,
        }
        params |= {f"label.{key}": value for key, value in (labels or {}).items()}
        async with aclosing(each(self._session, "/jobs", params, limit)) as found:
            async for item in found:
                yield self._job(item)


class AsyncJob:
    """A handle of one job. ``data`` is its state when it was last asked for; ``refresh`` asks."""

    def __init__(self, session: Session, data: JobData) -> None:
        self._session = session
        self.data = data
        self._losses: list[Series] = []

    @property
    def id(self) -> str:
        return self.data.id

    @property
    def status(self) -> str:
        return self.data.status

    @property
    def is_final(self) -> bool:
        return self.data.is_final

    async def refresh(self) -> AsyncJob:
        """Ask the server again; self."""
        return await self._take("GET")

    async def cancel(self) -> AsyncJob:
        """Ask for the end; self. ``wait`` afterwards to see it."""
        return await self._take("POST", "/cancel")

    async def pause(self) -> AsyncJob:
        """Checkpoint and free the node; self. Errors: WrongStatus for a job that has ended."""
        return await self._take("POST", "/pause")

    async def resume(self) -> AsyncJob:
        """Queue a paused job again; self. Errors: WrongStatus."""
        return await self._take("POST", "/resume")

    async def start(self, *, allow_waiting: bool = False) -> AsyncJob:
        """Queue a draft, or a paused job; self. Errors: WrongStatus, NoCapableNode."""
        return await self._take("POST", "/start", params={"allow_waiting": _flag(allow_waiting)})

    async def edit(
        self,
        *,
        name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        notes: str | None = None,
        priority: int | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> AsyncJob:
        """Change what is given; self. A label of None is removed; ``spec`` is a merge patch over
        that of a draft. Errors: SpecInvalid, WrongStatus."""
        wanted: dict[str, Any] = {"name": name, "notes": notes, "priority": priority}
        wanted |= {
            "labels": dict(labels) if labels is not None else None,
            "spec": dict(spec) if spec is not None else None,
        }
        changes = {key: value for key, value in wanted.items() if value is not None}
        return await self._take("PATCH", json=changes)

    async def clone(
        self,
        overrides: Mapping[str, Any] | None = None,
        *,
        draft: bool = False,
        allow_waiting: bool = False,
    ) -> AsyncJob:
        """A new job with this one's spec, changed by a merge patch (RFC 7396): None takes a member
        back to its default. Errors: as of ``create``."""
        answer = await self._session.request(
            "POST",
            self._path("/clone"),
            json=dict(overrides or {}),
            params={"draft": _flag(draft), "allow_waiting": _flag(allow_waiting)},
        )
        return AsyncJob(self._session, JobData.model_validate(answer))

    async def delete(self) -> None:
        """Remove an ended job (or a draft): spec, metrics, logs, artifacts. Its events stay.

        Errors: WrongStatus, Conflict while another job begins with its model.
        """
        await self._session.request("DELETE", self._path())

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> AsyncJob:
        """Return self when the job has ended.

        Errors: WaitTimeout after ``timeout`` seconds; with ``check``, JobFailed when it ended
        other than ``succeeded``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        await self.refresh()
        while not self.data.is_final:
            left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"Job {self.id} is still {self.status} after {timeout:g} s.")
            await self._long_poll(min(left, LONG_POLL_SECONDS))
        if check and self.status != "succeeded":
            raise JobFailed(self.data)
        return self

    async def stream(
        self,
        *,
        after: int | None = None,
        include: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Live events from the job's first (or the one after number ``after``) to its end.

        ``include`` names what is wanted of ``status``, ``events``, ``metrics``, ``logs``;
        ``metrics`` has patterns of metric names (``train/*``).
        """
        params = {"include": _listed(include), "metrics": _listed(metrics)}
        path = with_query(self._path("/stream"), params)
        async with aclosing(follow(self._session, path, after=after)) as events:
            async for event in events:
                yield event

    async def events(
        self, *, after: int = 0, kinds: Sequence[str] | None = None
    ) -> AsyncIterator[JobEvent]:
        """The job's history so far, oldest first."""
        while True:
            answer = await self._session.request(
                "GET",
                self._path("/events"),
                params={"after": after, "kind": _listed(kinds), "limit": 500},
            )
            found = items_of(answer)
            for item in found:
                yield JobEvent.model_validate(item)
            if len(found) < 500:
                return
            after = int(answer["next_after"])

    async def metrics(
        self,
        *names: str,
        attempt: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
        form: str | None = None,
        x: str | None = None,
    ) -> Metrics:
        """The named metrics (patterns such as ``fp8/*/amax`` too; all without names), one series
        for each attempt that has it. ``to_numpy``, ``to_pandas`` and ``to_arrow`` turn them.

        ``max_points`` of each series keep every bucket's least, greatest and last; ``form`` is
        ``points`` or ``buckets``, ``x`` ``step``, ``time`` (seconds since the epoch) or ``tokens``.
        """
        params = {
            "keys": ",".join(names) or None,
            "attempt": attempt,
            "from_step": from_step,
            "to_step": to_step,
            "max_points": max_points,
            "form": form,
            "x": x,
        }
        answer = await self._session.request("GET", self._path("/metrics"), params=params)
        return metrics_of(answer["series"])

    async def latest_metrics(self, *names: str) -> AsyncIterator[MetricValue]:
        """The newest value of each metric, by name; of those that the names or patterns name."""
        params: dict[str, Any] = {"name": list(names) or None}
        path = self._path("/metrics/latest")
        async with aclosing(each(self._session, path, params, None, page=1000)) as found:
            async for item in found:
                yield MetricValue.model_validate(item)

    async def save_metrics(
        self, target: str | Path, *names: str, max_points: int | None = None
    ) -> Path:
        """Write metrics into a file, as CSV (``.csv``) or an Arrow stream (``.arrow``); its path.

        Neither pyarrow nor pandas is needed.
        """
        file = Path(target)
        kinds = {".csv": _CSV, ".arrow": _ARROW, ".arrows": _ARROW}
        if file.suffix not in kinds:
            raise OctrainError(f"{file.name}: the name must end in .csv or .arrow")
        params = {"keys": ",".join(names) or None, "max_points": max_points}
        draft = file.with_name(f".{file.name}.part")
        try:
            async with self._session.stream(
                with_query(self._path("/metrics"), params),
                headers={"Accept": kinds[file.suffix]},
                read_timeout=60.0,
            ) as body:
                with draft.open("wb") as out:
                    async for chunk in body.chunks():
                        out.write(chunk)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        return file

    async def logs(
        self,
        *,
        after: int = 0,
        limit: int | None = None,
        tail: int | None = None,
        wanted: LogFilter | None = None,
    ) -> AsyncIterator[LogLine]:
        """The lines that the trainer printed so far, page by page; the last ones with ``tail``."""
        log = self._log(wanted)
        if tail is not None:
            for line in await log.tail(tail):
                yield line
            return
        async for line in log.after(after, limit):
            yield line

    async def follow_logs(
        self, *, after: int = 0, tail: int | None = None, wanted: LogFilter | None = None
    ) -> AsyncIterator[LogLine]:
        """The lines so far (or the last ones) and every later one, until the job has ended."""
        await self.refresh()
        # Numbers known before the lines are read: what is printed meanwhile is in the stream.
        event, ended = self.data.last_event, self.data.is_final
        async for line in self.logs(after=after, tail=tail, wanted=wanted):
            after = line.seq
            yield line
        if not ended:
            async with aclosing(self._log(wanted).follow(after, event)) as lines:
                async for line in lines:
                    yield line

    async def save_log(
        self, target: str | Path | None = None, wanted: LogFilter | None = None
    ) -> Path:
        """Write the log so far into a file (``<job id>.log``); its path."""
        file = Path(target) if target is not None else Path(f"{self.id}.log")
        return await self._log(wanted).save(file)

    async def artifacts(self, kind: str | None = None) -> list[Artifact]:
        """What the job has made so far, or what of one kind."""
        answer = await self._session.request("GET", self._path("/artifacts"), params={"kind": kind})
        return [Artifact.model_validate(item) for item in items_of(answer)]

    async def artifact(self, which: str) -> Artifact:
        """An artifact by its id, or the newest of a kind (``model``). Errors: NotFound."""
        found = [a for a in await self.artifacts() if which in (a.id, a.kind, a.name)]
        if not found:
            raise NotFound(f"Job {self.id} ({self.status}) has no artifact {which!r}.", status=404)
        return max(found, key=lambda artifact: (artifact.step or 0, artifact.id))

    async def download(
        self,
        which: str = "model",
        folder: str | Path | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> Path:
        """Fetch an artifact (by id, or the newest of a kind) into ``folder``; the folder.

        Each file is checked against its sha256, and kept if it is there already. The default
        folder is ``<job id>-<kind>``. Errors: NotFound, DownloadDamaged.
        """
        artifact = await self.artifact(which)
        target = Path(folder) if folder is not None else Path(f"{self.id}-{artifact.kind}")
        target.mkdir(parents=True, exist_ok=True)
        await download_artifact(self._session, self.id, artifact, target, on_progress)
        return target

    async def download_model(
        self, target: str | Path | None = None, *, on_progress: OnProgress | None = None
    ) -> Path:
        """Fetch the model as one tar file (``<job id>.tar``); its path.

        Broken off, by the network or by the end of this process, it goes on where it stood.
        Errors: NotFound, DownloadDamaged, ServerUnreachable.
        """
        file = Path(target) if target is not None else Path(f"{self.id}.tar")
        return await download_archive(self._session, self._path("/model"), file, on_progress)

    async def conversion(self) -> list[dict[str, Any]]:
        """One row a Linear or norm: ``name``, ``from``, ``to``, ``group``, ``reason``."""
        answer = await self._session.request("GET", self._path("/conversion"))
        return [dict(row) for row in items_of(answer, "rows")]

    async def precision(self) -> dict[str, Any]:
        """The method's precision table, measured on the job: ``rows`` by what they are about.

        Errors: NotFound, until the first step is done.
        """
        return dict(await self._session.request("GET", self._path("/precision")))

    async def load_curve(self) -> None:
        """Fetch the losses that the notebook's view of this job draws."""
        self._losses = list(await self.metrics("train/loss", "eval/loss", max_points=300))

    def _repr_html_(self) -> str:
        return job_html(self.data, self._losses)

    async def _take(self, method: str, rest: str = "", **options: Any) -> AsyncJob:
        answer = await self._session.request(method, self._path(rest), **options)
        self.data = JobData.model_validate(answer)
        return self

    async def _long_poll(self, seconds: float) -> None:
        """Ask for the job as soon as it differs from what we have, or after ``seconds``."""
        asked, version = time.monotonic(), self.data.version
        params = {"wait": max(1, int(seconds)), "since_version": version}
        await self._take("GET", params=params, timeout=LONG_POLL_SECONDS + 15.0)
        # A server that does not hold the request must not be asked in a tight loop.
        pause = _POLL_PAUSE - (time.monotonic() - asked)
        if not self.data.is_final and pause > 0:
            await self._session.exchange.sleep(pause)

    def _log(self, wanted: LogFilter | None) -> JobLog:
        return JobLog(self._session, self._path(), wanted or LogFilter())

    def _path(self, rest: str = "") -> str:
        return _path(self.id, rest)

    def __repr__(self) -> str:
        progress = self.data.progress
        kind = type(self).__name__
        return f"{kind}({self.id!r}, {self.status}, step {progress.step}/{progress.total_steps})"


def _path(job_id: str, rest: str = "") -> str:
    return f"/jobs/{quote(job_id, safe='')}{rest}"


def _flag(wanted: bool) -> str | None:
    return "true" if wanted else None


def _time(moment: datetime | str | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment


def _listed(names: Sequence[str] | None) -> str | None:
    return None if names is None else ",".join(names)
