"""The client and the handle of a job."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from octrain.client.connection import find_connection
from octrain.client.downloads import OnProgress, download_artifact
from octrain.client.errors import JobFailed, OctrainError, WaitTimeout
from octrain.client.events import follow
from octrain.client.logs import JobLog, LogFilter
from octrain.client.models import Artifact, JobData, LogLine, Node, Series, StreamEvent
from octrain.client.transport import Transport, with_query

# The server holds a long poll at most this long.
LONG_POLL_SECONDS = 30
_POLL_PAUSE = 0.5


class Client:
    """A connection to an Octrain server.

    ``url`` and ``key`` default to OCTRAIN_API_URL and OCTRAIN_API_KEY, then to the local stack of
    this machine. ``timeout`` (seconds) is that of one request. ``http`` is an httpx client of your
    own (proxies, certificates). Not to be shared between threads.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        http: httpx.Client | None = None,
    ) -> None:
        self._transport = Transport(find_connection(url, key), timeout=timeout, http=http)
        self.jobs = Jobs(self._transport)

    @property
    def url(self) -> str:
        return self._transport.connection.url

    def nodes(self) -> list[Node]:
        """The machines that run jobs."""
        answer = self._transport.request("GET", "/nodes")
        return [Node.model_validate(item) for item in _items(answer)]

    def events(self, *, after: int | str | None = None) -> Iterator[StreamEvent]:
        """What happens to all jobs of this key, live and without end; ``data["job_id"]`` says to
        which. ``after`` is an event's ``id`` to go on from, or 0 for everything so far."""
        return follow(self._transport, "/events/stream", after=after)

    def create_key(
        self, name: str, owner: str, scopes: Sequence[str], *, node: str | None = None
    ) -> str:
        """Make an API key (scope admin); the key, which the server never tells again.

        ``node`` is the one node that a key of the scope ``node`` speaks for.
        """
        wanted = {"name": name, "owner": owner, "scopes": list(scopes)}
        if node is not None:
            wanted["node"] = node
        return str(self._transport.request("POST", "/keys", json=wanted)["key"])

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"


class Jobs:
    """``client.jobs``"""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job; it is stored when this returns.

        ``idempotency_key`` (one is made for each call otherwise) makes a repeated call return the
        first one's job. Errors: OctrainError with status 422 and ``pointers`` for a wrong spec.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        answer = self._transport.request("POST", "/jobs", json=dict(spec), headers=headers)
        return Job(self._transport, JobData.model_validate(answer))

    def get(self, job_id: str) -> Job:
        """The job with this id. Errors: OctrainError with status 404."""
        answer = self._transport.request("GET", f"/jobs/{quote(job_id, safe='')}")
        return Job(self._transport, JobData.model_validate(answer))

    def list(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> Iterator[Job]:
        """Jobs, the newest first, page by page as they are taken; all of them without ``limit``."""
        statuses = status if status is None or isinstance(status, str) else ",".join(status)
        params: dict[str, Any] = {"status": statuses, "name": name}
        params |= {f"label.{key}": value for key, value in (labels or {}).items()}
        left = limit
        while left is None or left > 0:
            params["limit"] = 100 if left is None else min(left, 100)
            answer = self._transport.request("GET", "/jobs", params=params)
            items = _items(answer)
            for item in items[:left]:
                yield Job(self._transport, JobData.model_validate(item))
            left = None if left is None else left - len(items)
            params["cursor"] = answer.get("next_cursor") if isinstance(answer, dict) else None
            if not params["cursor"] or not items:
                return

    def cancel(self, job_id: str) -> Job:
        """Ask for the job's end, and return it as it is then. Twice is as good as once."""
        answer = self._transport.request("POST", f"/jobs/{quote(job_id, safe='')}/cancel")
        return Job(self._transport, JobData.model_validate(answer))


class Job:
    """A handle of one job. ``data`` is its state when it was last asked for; ``refresh`` asks."""

    def __init__(self, transport: Transport, data: JobData) -> None:
        self._transport = transport
        self.data = data

    @property
    def id(self) -> str:
        return self.data.id

    @property
    def status(self) -> str:
        return self.data.status

    @property
    def is_final(self) -> bool:
        return self.data.is_final

    def refresh(self) -> Job:
        """Ask the server again; self."""
        self.data = JobData.model_validate(self._transport.request("GET", self._path()))
        return self

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Job:
        """Return self when the job has ended.

        Errors: WaitTimeout after ``timeout`` seconds; with ``check``, JobFailed when it ended
        other than ``succeeded``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.refresh()
        while not self.data.is_final:
            left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"Job {self.id} is still {self.status} after {timeout:g} s.")
            self._long_poll(min(left, LONG_POLL_SECONDS))
        if check and self.status != "succeeded":
            raise JobFailed(self.data)
        return self

    def _long_poll(self, seconds: float) -> None:
        """Ask for the job as soon as it differs from what we have, or after ``seconds``."""
        asked, version = time.monotonic(), self.data.version
        params = {"wait": max(1, int(seconds)), "since_version": version}
        answer = self._transport.request(
            "GET", self._path(), params=params, timeout=LONG_POLL_SECONDS + 15.0
        )
        self.data = JobData.model_validate(answer)
        # A server that does not hold the request must not be asked in a tight loop.
        pause = _POLL_PAUSE - (time.monotonic() - asked)
        if not self.data.is_final and pause > 0:
            time.sleep(pause)

    def stream(
        self,
        *,
        after: int | None = None,
        include: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
    ) -> Iterator[StreamEvent]:
        """Live events from the job's first (or the one after number ``after``) to its end.

        ``include`` names what is wanted of ``status``, ``events``, ``metrics``, ``logs``;
        ``metrics`` has patterns of metric names (``train/*``).
        """
        params = {"include": _listed(include), "metrics": _listed(metrics)}
        path = with_query(self._path("/stream"), params)
        return follow(self._transport, path, after=after)

    def metrics(
        self, *names: str, from_step: int | None = None, max_points: int | None = None
    ) -> list[Series]:
        """The named metrics (all without names), one series for each attempt that has it."""
        params = {
            "keys": ",".join(names) or None,
            "from_step": from_step,
            "max_points": max_points,
        }
        answer = self._transport.request("GET", self._path("/metrics"), params=params)
        return [Series.model_validate(item) for item in answer["series"]]

    def logs(
        self,
        *,
        after: int = 0,
        limit: int | None = None,
        tail: int | None = None,
        wanted: LogFilter | None = None,
    ) -> Iterator[LogLine]:
        """The lines that the trainer printed so far, page by page; the last ones with ``tail``."""
        log = JobLog(self._transport, self._path(), wanted or LogFilter())
        return iter(log.tail(tail)) if tail is not None else log.after(after, limit)

    def follow_logs(
        self, *, after: int = 0, tail: int | None = None, wanted: LogFilter | None = None
    ) -> Iterator[LogLine]:
        """The lines so far (or the last ones) and every later one, until the job has ended."""
        self.refresh()
        log = JobLog(self._transport, self._path(), wanted or LogFilter())
        # Numbers known before the lines are read: what is printed meanwhile is in the stream.
        event, ended = self.data.last_event, self.data.is_final
        for line in self.logs(after=after, tail=tail, wanted=wanted):
            after = line.seq
            yield line
        if not ended:
            yield from log.follow(after, event)

    def save_log(self, target: str | Path | None = None, wanted: LogFilter | None = None) -> Path:
        """Write the log so far into a file (``<job id>.log``); its path."""
        log = JobLog(self._transport, self._path(), wanted or LogFilter())
        return log.save(Path(target) if target is not None else Path(f"{self.id}.log"))

    def artifacts(self) -> list[Artifact]:
        """What the job has made so far."""
        answer = self._transport.request("GET", self._path("/artifacts"))
        return [Artifact.model_validate(item) for item in _items(answer)]

    def artifact(self, which: str) -> Artifact:
        """An artifact by its id, or the newest of a kind (``model``). Errors: OctrainError."""
        found = [a for a in self.artifacts() if which in (a.id, a.kind, a.name)]
        if not found:
            raise OctrainError(f"Job {self.id} ({self.status}) has no artifact {which!r}.")
        return max(found, key=lambda artifact: (artifact.step or 0, artifact.id))

    def download(
        self,
        which: str = "model",
        folder: str | Path | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> Path:
        """Fetch an artifact (by id, or the newest of a kind) into ``folder``; the folder.

        Each file is checked against its sha256. The default folder is ``<job id>-<kind>``.
        """
        artifact = self.artifact(which)
        target = Path(folder) if folder is not None else Path(f"{self.id}-{artifact.kind}")
        target.mkdir(parents=True, exist_ok=True)
        download_artifact(self._transport, self.id, artifact, target, on_progress)
        return target

    def conversion(self) -> list[dict[str, Any]]:
        """One row a Linear or norm: ``name``, ``from``, ``to``, ``group``, ``reason``."""
        answer = self._transport.request("GET", self._path("/conversion"))
        return [dict(row) for row in _items(answer, "rows")]

    def precision(self) -> dict[str, Any]:
        """The method's precision table, measured on the job: ``rows`` by what they are about.

        Errors: OctrainError, until the first step is done.
        """
        answer = self._transport.request("GET", self._path("/precision"))
        return dict(answer)

    def cancel(self) -> Job:
        """Ask for the end; self. ``wait`` afterwards to see it."""
        answer = self._transport.request("POST", self._path("/cancel"))
        self.data = JobData.model_validate(answer)
        return self

    def _path(self, rest: str = "") -> str:
        return f"/jobs/{quote(self.id, safe='')}{rest}"

    def __repr__(self) -> str:
        progress = self.data.progress
        return f"Job({self.id!r}, {self.status}, step {progress.step}/{progress.total_steps})"


def _listed(names: Sequence[str] | None) -> str | None:
    return None if names is None else ",".join(names)


def _items(answer: Any, name: str = "items") -> list[Any]:
    """The list in an answer that is one, or that holds one."""
    found = answer.get(name, answer.get("items")) if isinstance(answer, dict) else answer
    return found if isinstance(found, list) else []
