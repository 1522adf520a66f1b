"""The worker's side of the HTTP contract, typed, with its errors told apart.

Four things can happen to a call, and a supervisor acts differently on each: it is answered; the API
is away or unwell (``ApiUnavailable``, to be tried again); the attempt belongs to somebody else or
has ended (``StaleAttempt``, the end of this supervisor); or the call itself is wrong
(``ApiRefused``).
"""

from __future__ import annotations

import random
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octrain_worker.supervisor.packing import CONTENT_TYPE as TELEMETRY_TYPE
from octrain_worker.supervisor.packing import pack

__all__ = [
    "ApiClient",
    "ApiRefused",
    "ApiUnavailable",
    "Claim",
    "DatasetPoint",
    "HeartbeatAnswer",
    "LeftoverOrder",
    "ModelPoint",
    "NodeAnswer",
    "PlacedAttempt",
    "PlanQuestion",
    "Registration",
    "ResumePoint",
    "SequenceGap",
    "StaleAttempt",
    "TelemetryAnswer",
    "Wanted",
    "WishAnswer",
    "retrying",
]

Wanted = Literal["run", "pause", "cancel"]
T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)

_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class ApiUnavailable(Exception):
    """The API did not answer, or said that it cannot now. Trying again may help."""


class ApiRefused(Exception):
    """The API understood and said no; ``status`` is the HTTP status, the message its reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class StaleAttempt(Exception):
    """The attempt is claimed by another supervisor, has ended, or is not known: nothing may be
    written to it."""


class SequenceGap(Exception):
    """Records are missing before those that were sent; ``expected`` is the next the API takes."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"the API expects record {expected} next")
        self.expected = expected


class _Answer(BaseModel):
    # An API newer than this worker may say more.
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Enrolled(_Answer):
    key: str = Field(repr=False)


class Registration(_Answer):
    node_id: str
    queue: str
    heartbeat_interval_seconds: float = Field(default=5.0, gt=0)


class PlacedAttempt(_Answer):
    """An attempt that was placed on this node and that nobody has claimed."""

    attempt_id: str
    job_id: str
    attempt: int


class LeftoverOrder(_Answer):
    """A folder of the node's artifact store that is to go, but for the files in ``keep``, which
    are paths below it."""

    id: str
    url: str
    keep: list[str] = []


class NodeAnswer(_Answer):
    wanted: str = "run"
    placed: list[PlacedAttempt] = []
    leftovers: list[LeftoverOrder] = []


class Manifest(_Answer):
    files: list[dict[str, Any]]


class ResumePoint(_Answer):
    """A checkpoint in the artifact store: its step, its folder's URL and what is in it."""

    artifact_id: str
    step: int
    url: str
    manifest: Manifest

    @property
    def files(self) -> list[dict[str, Any]]:
        """Its files by ``path``, with ``size`` and ``sha256``."""
        return self.manifest.files

    @property
    def size(self) -> int:
        return sum(int(file["size"]) for file in self.files)


class ModelPoint(_Answer):
    """Another job's model in the artifact store: its folder's URL and what is in it."""

    job: str
    url: str
    files: list[dict[str, Any]]


class WishAnswer(_Answer):
    """What the service wants of an attempt: in every answer that a supervisor gets."""

    wanted: Wanted = "run"
    # Why the service itself wants a stop; None when a user does.
    wanted_reason: str | None = None
    # What is left of the time in which to stop; None without a deadline.
    stop_within_seconds: float | None = Field(default=None, ge=0)


class DatasetPoint(_Answer):
    """An uploaded data set in the artifact store: its folder's URL, its file and what that is."""

    dataset: str
    url: str
    path: str
    size: int
    sha256: str


class Claim(WishAnswer):
    """An attempt that is now this supervisor's: everything it needs to run it."""

    attempt_id: str
    job_id: str
    attempt: int
    fencing_token: int | str
    spec: dict[str, Any]
    lease_seconds: float = Field(gt=0)
    lease_number: int | None = None
    heartbeat_interval_seconds: float = Field(default=5.0, gt=0)
    artifact_prefix: str
    # Checkpoints to go on from, best first.
    resume_candidates: list[ResumePoint] = []
    model_from: ModelPoint | None = None
    dataset_from: DatasetPoint | None = None
    device: str = "cpu"
    gpu_indices: list[int] = []
    # W3C trace context of the request that made the job.
    traceparent: str | None = None
    # The folders that the job's owner may read; None: all of the node's roots.
    roots: list[str] | None = None


class HeartbeatAnswer(WishAnswer):
    lease_seconds: float = Field(gt=0)
    lease_number: int | None = None


class TelemetryAnswer(WishAnswer):
    """The last record the API has, and what it wants."""

    acknowledged_seq: int


class PlanQuestion(_Answer):
    """A spec that somebody wants planned, and the name of the question."""

    key: str
    spec: dict[str, Any]
    roots: list[str] | None = None


class _Taken(_Answer):
    question: PlanQuestion | None = None


class _Artifact(_Answer):
    artifact_id: str


class _Finished(_Answer):
    job_status: str = ""


class ApiClient:
    """Calls one API as one node. Safe to share between threads."""

    def __init__(
        self, url: str, key: str, *, timeout: float = 10.0, ca_file: Path | None = None
    ) -> None:
        trusted = ssl.create_default_context()
        if ca_file is not None:
            trusted.load_verify_locations(ca_file)
        self._http = httpx.Client(
            base_url=url.rstrip("/") + "/v1",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            verify=trusted,
            # The API is where it is said to be, whatever a proxy variable says of the rest.
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def enrol(self, token: str, node: str) -> str:
        """Exchanges a one-time token for the node's key."""
        return self._post("/nodes/enrol", {"token": token, "node": node}, _Enrolled).key

    def register(self, description: dict[str, Any]) -> Registration:
        return self._post("/nodes/register", description, Registration)

    def node_heartbeat(
        self,
        node_id: str,
        active_attempts: Sequence[str],
        removed: Sequence[str] = (),
        *,
        stopping: bool = False,
    ) -> NodeAnswer:
        """``removed``: ids of leftovers that are gone from the store. ``stopping``: the node shuts
        down, and is to be given nothing more."""
        body = {
            "active_attempts": list(active_attempts),
            "removed": list(removed),
            "stopping": stopping,
        }
        return self._post(f"/nodes/{node_id}/heartbeat", body, NodeAnswer)

    def node_metrics(self, node_id: str, samples: Sequence[dict[str, Any]]) -> None:
        self._post(f"/nodes/{node_id}/metrics", {"samples": list(samples)}, _Answer)

    def take_plan(self, node_id: str, *, wait: float) -> PlanQuestion | None:
        """The next spec to plan; None when none was asked for within `wait` seconds."""
        path = f"/nodes/{node_id}/plans:take?wait={wait:g}"
        return self._post(path, {}, _Taken).question

    def answer_plan(
        self, node_id: str, key: str, result: dict[str, Any] | None, problem: str | None
    ) -> None:
        """Tells what a spec takes, or why that cannot be told."""
        body = {"result": result, "problem": problem}
        self._post(f"/nodes/{node_id}/plans/{key}", body, _Answer)

    def claim(
        self, attempt_id: str, *, node_id: str, supervisor: str, traceparent: str | None = None
    ) -> Claim:
        """``traceparent`` is the W3C trace context that the request belongs to."""
        body = {"node_id": node_id, "supervisor": supervisor}
        path = f"/attempts/{attempt_id}/claim"
        headers = {"traceparent": traceparent} if traceparent is not None else {}
        return self._post(path, body, Claim, headers)

    def heartbeat(
        self,
        attempt_id: str,
        token: int | str,
        *,
        phase: str | None,
        step: int | None,
        lease_number: int | None = None,
    ) -> HeartbeatAnswer:
        body = {
            "fencing_token": token,
            "phase": phase,
            "step": step,
            "lease_number": lease_number,
        }
        return self._post(f"/attempts/{attempt_id}/heartbeat", body, HeartbeatAnswer)

    def telemetry(
        self, attempt_id: str, token: int | str, first_seq: int, records: Sequence[dict[str, Any]]
    ) -> TelemetryAnswer:
        """Sends records numbered from ``first_seq``."""
        path = f"/attempts/{attempt_id}/telemetry"
        return self._post(path, pack(token, first_seq, records), TelemetryAnswer)

    def artifact(self, attempt_id: str, token: int | str, artifact: dict[str, Any]) -> str:
        body = {"fencing_token": token, **artifact}
        return self._post(f"/attempts/{attempt_id}/artifacts", body, _Artifact).artifact_id

    def finish(self, attempt_id: str, token: int | str, outcome: dict[str, Any]) -> str:
        """Ends the attempt; returns the job's status."""
        body = {"fencing_token": token, **outcome}
        return self._post(f"/attempts/{attempt_id}/finish", body, _Finished).job_status

    def _post(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        answer: type[Answer],
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        try:
            if isinstance(body, bytes):
                response = self._http.post(
                    path, content=body, headers={"Content-Type": TELEMETRY_TYPE}
                )
            else:
                response = self._http.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise ApiUnavailable(f"POST {path}: {error or type(error).__name__}") from error
        if response.is_success:
            try:
                return answer.model_validate_json(response.content)
            except ValidationError as error:
                # A proxy's page in place of the API's answer, most likely.
                raise ApiUnavailable(f"POST {path}: not the expected answer: {error}") from error
        problem = _problem(response)
        message = str(problem.get("detail") or problem.get("title") or response.reason_phrase)
        if response.status_code in _TRY_AGAIN:
            raise ApiUnavailable(f"POST {path}: {message} (HTTP {response.status_code})")
        if response.status_code in (409, 410):
            expected = problem.get("expected_seq")
            if isinstance(expected, int):
                raise SequenceGap(expected)
            raise StaleAttempt(message)
        if _is_unknown_attempt(path, response.status_code, problem):
            raise StaleAttempt(message)
        raise ApiRefused(response.status_code, f"POST {path}: {message}")


def retrying(
    call: Callable[[], T],
    *,
    stop: threading.Event,
    first_delay: float = 0.1,
    longest_delay: float = 5.0,
    on_failure: Callable[[Exception, float], None] | None = None,
) -> T | None:
    """Calls until it is answered, waiting longer after each ``ApiUnavailable``, with jitter.

    Returns None when ``stop`` was set first. Other errors are raised.
    """
    delay = first_delay
    while not stop.is_set():
        try:
            return call()
        except ApiUnavailable as error:
            pause = delay * random.uniform(0.7, 1.3)
            if on_failure is not None:
                on_failure(error, pause)
            stop.wait(pause)
            delay = min(delay * 2, longest_delay)
    return None


def _is_unknown_attempt(path: str, status: int, problem: Mapping[str, Any]) -> bool:
    """Whether the API itself says that it has no such attempt of this node: its database was
    restored from before, perhaps. What a proxy answers while it finds no API says nothing."""
    said = str(problem.get("type", ""))
    return status == 404 and path.startswith("/attempts/") and said.endswith("/problems/not-found")


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
