"""One job: everything that can be asked of it, written once for both clients."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from octrain.client.curves import job_html
from octrain.client.downloads import OnProgress, download_archive, download_artifact
from octrain.client.errors import JobFailed, NotFound, OctrainError, WaitTimeout, may_pass
from octrain.client.events import PATIENCE_SECONDS, follow
from octrain.client.frames import Metrics, metrics_of
from octrain.client.logs import JobLog, LogFilter
from octrain.client.models import (
    Artifact,
    JobData,
    JobEvent,
    LogLine,
    MetricValue,
    StreamEvent,
)
from octrain.client.pages import each, items_of
from octrain.client.series import Series
from octrain.client.session import Session, one_time_key, with_query

# The server holds a long poll at most this long.
LONG_POLL_SECONDS = 30
_POLL_PAUSE = 0.5
_EVENTS = 500
_CSV, _ARROW = "text/csv", "application/vnd.apache.arrow.stream"


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
        return await self._take("POST", "/start", params={"allow_waiting": flag(allow_waiting)})

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
            headers=one_time_key(),
            params={"draft": flag(draft), "allow_waiting": flag(allow_waiting)},
        )
        return AsyncJob(self._session, JobData.model_validate(answer))

    async def delete(self) -> None:
        """Remove an ended job (or a draft): spec, metrics, logs, artifacts. Its events stay.

        Errors: WrongStatus, Conflict while another job begins with its model.
        """
        await self._session.request("DELETE", self._path())

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> AsyncJob:
        """Return self when the job has ended.

        A server that goes away meanwhile is asked again, for a minute. Errors: WaitTimeout after
        ``timeout`` seconds; with ``check``, JobFailed when it ended other than ``succeeded``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        lost_at: float | None = None
        await self.refresh()
        while not self.data.is_final:
            left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"Job {self.id} is still {self.status} after {timeout:g} s.")
            try:
                await self._long_poll(min(left, LONG_POLL_SECONDS))
                lost_at = None
            except OctrainError as error:
                lost_at = lost_at or time.monotonic()
                if not may_pass(error) or time.monotonic() - lost_at > PATIENCE_SECONDS:
                    raise
                await self._session.exchange.sleep(_POLL_PAUSE)
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
        async for event in history(self._session, self.id, after, kinds):
            yield event

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
        made = await self.artifacts()
        found = [a for a in made if which in (a.id, a.kind, a.name)]
        if not found:
            kinds = ", ".join(sorted({a.kind for a in made})) or "none"
            raise NotFound(
                f"Job {self.id} ({self.status}) has no artifact {which!r}. It has: {kinds}.",
                status=404,
            )
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
        return path_of(self.id, rest)

    def __repr__(self) -> str:
        progress = self.data.progress
        kind = type(self).__name__
        return f"{kind}({self.id!r}, {self.status}, step {progress.step}/{progress.total_steps})"


async def history(
    session: Session, job_id: str, after: int, kinds: Sequence[str] | None
) -> AsyncIterator[JobEvent]:
    """A job's events numbered above ``after``, page by page."""
    while True:
        answer = await session.request(
            "GET",
            path_of(job_id, "/events"),
            params={"after": after, "kind": _listed(kinds), "limit": _EVENTS},
        )
        found = items_of(answer)
        for item in found:
            yield JobEvent.model_validate(item)
        if len(found) < _EVENTS:
            return
        after = int(answer["next_after"])


def path_of(job_id: str, rest: str = "") -> str:
    """The address of a job, or of something below it."""
    return f"/jobs/{quote(job_id, safe='')}{rest}"


def flag(wanted: bool) -> str | None:
    """A parameter that is given only where it is wanted."""
    return "true" if wanted else None


def _listed(names: Sequence[str] | None) -> str | None:
    return None if names is None else ",".join(names)
