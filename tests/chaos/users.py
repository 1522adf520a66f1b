"""The users of a chaos run: they post jobs, and pause, resume and cancel some of them.

A user has both addresses of the API and asks again, with the same idempotency key, until somebody
answers. What was answered is what the service is held to.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.schedule import UserAction
from tests.chaos.stack import LEASE_SECONDS
from tests.running_service import tiny_spec

__all__ = ["Api", "PostedJob", "Users", "job_spec"]

REAL_STEPS = 1200
TWO_RANK_STEPS = 600
_REAL_EVERY = 6  # so many jobs have one real trainer among them, and every third of those two ranks
_TWO_RANKS = 3  # the seed of those
_PATIENCE_SECONDS = 120.0


@dataclass
class PostedJob:
    """A job that was taken, and what has been asked of it since."""

    id: str
    kind: str
    seed: int
    steps: int
    spec: Mapping[str, Any]
    key: str
    asked: list[str] = field(default_factory=list)
    cancelled: bool = False
    paused: bool = False


class Api:
    """The API by all its addresses. ``wrong`` counts answers that no client should ever get."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._urls = list(urls)
        self._turn = itertools.count()
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"}, timeout=10.0, trust_env=False
        )
        self.wrong: Counter[str] = Counter()

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """The first answer that is one, from whichever address gives it. Errors: TimeoutError."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        pause = 0.05
        while True:
            url = self._urls[next(self._turn) % len(self._urls)]
            try:
                answer = self._http.request(method, f"{url}/v1{path}", **arguments)
            except httpx.TransportError as error:
                last = repr(error)
            else:
                in_flight = answer.status_code == 409 and "-in-flight" in answer.json()["type"]
                if answer.status_code < 500 and not in_flight:
                    return answer
                last = f"{answer.status_code} {answer.text[:500]}"
                # In flight: the other address may still be working on what was asked of it before.
                if answer.status_code != 503 and not in_flight:
                    self.wrong[f"{method} {path.partition('?')[0]}: {last}"] += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{method} {path} is not answered: {last}")
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.ask("GET", path, params=parameters or None)
        assert answer.status_code == 200, answer.text
        return answer.json()


def job_spec(number: int) -> tuple[str, int, dict[str, Any]]:
    """The kind, the seed and the spec of job ``number``: the same in every run."""
    kind = "real" if number % _REAL_EVERY == _REAL_EVERY - 1 else "scripted"
    resources: dict[str, Any] = {"device": "cpu"}
    if kind == "real" and number // _REAL_EVERY % 3 == 0:
        seed, steps, every = _TWO_RANKS, TWO_RANK_STEPS, 50
        resources["cpu_ranks"] = 2
    elif kind == "real":
        seed, steps, every = number // _REAL_EVERY % 3, REAL_STEPS, 150
    else:
        seed, steps, every = number + 1, 200 + 40 * (number % 5), 25
    spec = tiny_spec(
        f"{kind}-{number}",
        labels={"trainer": kind, "seed": str(seed), "step_seconds": "0.05"},
        resources=resources,
        training={"steps": steps, "seed": seed},
        checkpoint={"every_steps": every, "keep_last": 2},
        limits={
            "lease_ttl_seconds": LEASE_SECONDS,
            "max_restarts": 100,
            "restart_backoff_seconds": 0,
            "cancel_deadline_seconds": 10,
        },
    )
    return kind, seed, spec


class Users:
    """Posts at the given seconds and does the actions; both in threads of their own."""

    def __init__(
        self, api: Api, posts: Sequence[float], actions: Sequence[UserAction], began: float
    ) -> None:
        self.api = api
        self.jobs: list[PostedJob] = []
        self.refused: list[str] = []
        self.done: Counter[str] = Counter()
        self._began = began
        self._actions = actions
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guard, args=(self._post_all, posts), daemon=True),
            threading.Thread(target=self._guard, args=(self._act_all,), daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait for what is under way, and raise what went wrong in it."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error

    def post_beside(self, count: int) -> None:
        """More jobs, now, from a thread of their own."""
        thread = threading.Thread(
            target=self._guard, args=(self._post_all, [0.0] * count), daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _guard(self, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def _wait_until(self, at: float) -> bool:
        return not self._stop.wait(max(0.0, self._began + at - time.monotonic()))

    def _post_all(self, posts: Sequence[float]) -> None:
        for at in posts:
            if self._wait_until(at):
                self._post()

    def _post(self) -> None:
        with self._lock:
            number = next(self._numbers)
        kind, seed, spec = job_spec(number)
        key = f"chaos-{number}"
        answer = self.api.ask(
            "POST",
            "/jobs",
            params={"allow_waiting": True},
            json=spec,
            headers={"Idempotency-Key": key},
        )
        if answer.status_code not in (200, 201):
            self.refused.append(f"{spec['name']}: {answer.status_code} {answer.text[:500]}")
            return
        steps = int(spec["training"]["steps"])
        with self._lock:
            self.jobs.append(PostedJob(answer.json()["id"], kind, seed, steps, spec, key))
        self.done["post"] += 1

    def _act_all(self) -> None:
        due: list[tuple[float, str, float, float, PostedJob | None]] = [
            (action.at, action.kind, action.pick, action.seconds, None) for action in self._actions
        ]
        due.sort(key=lambda item: item[0], reverse=True)
        while due:
            at, kind, pick, seconds, job = due.pop()
            if not self._wait_until(at):
                return
            if job is None:
                with self._lock:
                    open_jobs = [j for j in self.jobs if not (j.cancelled or j.paused)]
                open_jobs = [j for j in open_jobs if not self._object(j)["is_final"]]
                if not open_jobs:
                    continue
                job = open_jobs[int(pick * len(open_jobs))]
            self.act(job, kind)
            if job.paused and kind == "pause":
                due.append((at + seconds, "resume", 0.0, 0.0, job))
                due.sort(key=lambda item: item[0], reverse=True)

    def _object(self, job: PostedJob) -> dict[str, Any]:
        return dict(self.api.get(f"/jobs/{job.id}"))

    def act(self, job: PostedJob, kind: str) -> None:
        """Ask for it until it is answered, and note what the answer promises."""
        answer = self.api.ask("POST", f"/jobs/{job.id}/{kind}")
        job.asked.append(f"{kind}: {answer.status_code}")
        if answer.status_code == 409:
            # The job has come to an end, or to a state from which this makes no sense, meanwhile.
            self.done[f"{kind} (refused)"] += 1
            if kind == "resume":
                job.paused = False
            return
        assert answer.status_code == 200, answer.text
        status = answer.json()["status"]
        self.done[kind] += 1
        if kind == "cancel":
            job.cancelled = status in ("cancelling", "cancelled")
        job.paused = kind == "pause" and status in ("pausing", "paused")

    def resume_all(self) -> None:
        """At the end nobody keeps a job paused."""
        for job in self.jobs:
            if not job.cancelled and self._object(job)["status"] == "paused":
                self.act(job, "resume")
