"""What a polling dashboard reads of a job is true in every answer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

FINAL = {"succeeded", "failed", "cancelled"}
# What may be seen after what; a poller may miss states in between.
LATER = {
    "queued": {"starting", "running", "pausing", "paused", "cancelling", *FINAL},
    "starting": {"running", "pausing", "cancelling", *FINAL},
    "running": {"pausing", "cancelling", *FINAL},
    "pausing": {"paused", "cancelling", *FINAL},
    "paused": {"queued", "starting", "running", "cancelled"},
    "cancelling": {"cancelled"},
    "succeeded": set(),
    "failed": set(),
    "cancelled": set(),
}


def check(job: dict[str, Any]) -> None:
    """What must hold in one answer by itself."""
    status, attempts = job["status"], job["attempts"]
    live = [attempt for attempt in attempts if attempt["status"] != "ended"]
    assert job["is_final"] == (status in FINAL)
    assert [attempt["number"] for attempt in attempts] == list(range(1, job["attempt"] + 1))
    assert len(live) == (status in {"starting", "running", "pausing", "cancelling"}), job
    assert live in ([], attempts[-1:])
    assert (job["queue_position"] is not None) == (status == "queued"), job
    assert (job["waiting_for"] is not None) == (status == "queued"), job
    if status == "queued":
        assert job["queue_position"] >= 1
        assert job["waiting_for"]
    assert (job["ended_at"] is not None) == job["is_final"]
    if job["is_final"]:
        assert job["reason"]
        assert job["progress"]["eta_seconds"] is None
    else:
        assert job["reason"] is None
    if status in {"running", "succeeded"}:
        assert job["started_at"] is not None
    if status == "succeeded":
        assert job["progress"]["step"] == job["progress"]["total_steps"]
        assert attempts[-1]["outcome"] == "succeeded"
    for attempt in attempts:
        ended = attempt["status"] == "ended"
        assert (attempt["ended_at"] is not None) == ended
        assert (attempt["outcome"] is not None) == ended
        assert (attempt["reason"] is not None) == ended
    assert 0 <= job["progress"]["step"] <= job["progress"]["total_steps"]
    assert job["progress"]["total_steps"] == job["spec"]["training"]["steps"]
    times = [job["created_at"], job["started_at"], job["ended_at"]]
    known = [text for text in times if text is not None]
    assert known == sorted(known)


class Poller:
    """Reads a job again and again, over a connection of its own, and judges every answer."""

    def __init__(self, url: str, key: str, job_id: str) -> None:
        self.seen: list[dict[str, Any]] = []
        self.unchanged = 0
        self.failure: BaseException | None = None
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )
        self._path = f"/v1/jobs/{job_id}"
        self._bodies: dict[str, str] = {}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def step(self) -> int:
        return int(self.seen[-1]["progress"]["step"]) if self.seen else 0

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(60)

    def join(self) -> list[dict[str, Any]]:
        self._thread.join(180)
        assert not self._thread.is_alive()
        self._http.close()
        if self.failure is not None:
            raise self.failure
        return self.seen

    def _run(self) -> None:
        try:
            while not self._enough.is_set() and not (self.seen and self.seen[-1]["is_final"]):
                self._once()
                self._enough.wait(0.06)  # the two cores are the job's as well
        except BaseException as error:
            self.failure = error

    def _once(self) -> None:
        # Every other time without a tag: the same tag must mean the same body.
        tagged = bool(self.seen) and len(self.seen) % 2 == 0
        headers = {"If-None-Match": next(reversed(self._bodies))} if tagged else {}
        answer = self._http.get(self._path, headers=headers)
        if answer.status_code == 304:
            self.unchanged += 1
            assert answer.headers["ETag"] == headers["If-None-Match"]
            assert answer.content == b""
            answer = self._http.get(self._path)
        assert answer.status_code == 200, answer.text
        job = answer.json()
        tag = answer.headers["ETag"]
        body = json.dumps(job, sort_keys=True)
        assert self._bodies.get(tag, body) == body, "one tag, two bodies"
        self._bodies.pop(tag, None)
        self._bodies[tag] = body
        check(job)
        if self.seen:
            self._compare(self.seen[-1], job)
        self.seen.append(job)

    @staticmethod
    def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
        assert after["version"] >= before["version"]
        assert after["last_event"] >= before["last_event"]
        if after["version"] == before["version"]:
            queue = {"queue_position": 0, "queue_as_of": 0, "waiting_for": 0}
            assert {**after, **queue} == {**before, **queue}
        if after["status"] != before["status"]:
            restarted = after["attempt"] > before["attempt"] or after["status"] == "queued"
            assert restarted or after["status"] in LATER[before["status"]]
        if after["attempt"] == before["attempt"]:
            assert after["progress"]["step"] >= before["progress"]["step"]
            assert after["progress"]["tokens"] >= before["progress"]["tokens"]
        assert before["latest_metrics"].keys() <= after["latest_metrics"].keys()
        assert after["spec"] == before["spec"]
        assert after["created_at"] == before["created_at"]
        for one, other in zip(before["attempts"], after["attempts"], strict=False):
            assert one["id"] == other["id"]
            assert one["status"] == other["status"] or other["status"] != "placed"


@pytest.fixture
def poll(service):
    pollers: list[Poller] = []

    def start(job) -> Poller:
        pollers.append(Poller(service.stack.url, service.stack.api_key, job.id))
        return pollers[-1]

    yield start
    for poller in pollers:
        poller.stop()


def test_a_job_from_post_to_model(service, poll):
    """Also how long the first step takes on a node that waits for work."""
    service.until(service.is_warm, "a spare trainer waits")
    began = time.monotonic()
    job = service.submit("polled", training={"steps": 60}, evaluation={"every_steps": 20})
    answered = time.monotonic() - began
    poller = poll(job)
    service.until(lambda: poller.failure or poller.step() >= 1, "a step", 30)
    first_step = time.monotonic() - began
    seen = poller.join()
    print(f"\nPOST answered in {answered:.3f} s, first step shown after {first_step:.2f} s")
    assert first_step < 10

    last = seen[-1]
    assert (last["status"], last["reason"]) == ("succeeded", "completed")
    assert last["progress"] == {
        "step": 60,
        "total_steps": 60,
        "tokens": last["progress"]["tokens"],
        "eta_seconds": None,
    }
    assert last["progress"]["tokens"] >= 60 * 16
    assert {"train/loss", "train/lr", "train/grad_norm", "eval/loss"} <= last[
        "latest_metrics"
    ].keys()
    statuses = [job["status"] for job in seen]
    order = ["queued", "starting", "running", "succeeded"]
    assert list(dict.fromkeys(statuses)) == [s for s in order if s in statuses]
    assert {"starting", "running"} <= set(statuses)
    assert poller.unchanged > 0, "no 304 was ever given"
    assert any(job["progress"]["eta_seconds"] is not None for job in seen)

    series = {s.name: s for s in job.metrics()}
    assert series["train/loss"].steps == list(range(1, 61))
    assert series["train/loss"].values[-1] == last["latest_metrics"]["train/loss"]
    assert {a.kind for a in job.artifacts()} >= {"model", "report", "conversion", "checkpoint"}
    rows = job.conversion()
    assert {row["to"] for row in rows if row["to"]}
    assert all(row["reason"] for row in rows if not row["to"])


def test_queued_jobs_say_where_they_stand_and_why(service, poll):
    long = [service.submit(f"long-{n}", training={"steps": 100_000}) for n in range(2)]
    for job in long:
        service.step(job, 1)
    # They hold the slots, and frozen they leave the processors to the others.
    trainers = [service.trainer(job) for job in long]
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    waiting = [service.submit(f"waiting-{n}") for n in range(2)]
    first = service.submit("urgent", priority=50)
    pollers = [poll(job) for job in (*waiting, first)]

    def positions() -> list[int | None]:
        return [service.object(job.id)["queue_position"] for job in [first, *waiting]]

    service.until(lambda: positions() == [1, 2, 3], "positions by priority, then age")
    service.until(
        lambda: "has all 2 CPU slot(s) in use" in service.object(waiting[1].id)["waiting_for"],
        "the reason of waiting",
    )
    waiting[0].cancel()
    assert waiting[0].status == "cancelled"
    assert positions() == [1, None, 2]
    # One slot at a time: of two freed at once, one tick could place both with one time of creation.
    for pid, job, follower in zip(trainers, long, (first, waiting[1]), strict=True):
        os.kill(pid, signal.SIGCONT)
        job.cancel()
        service.end(job, "cancelled")
        service.end(follower, "succeeded")
    for poller in pollers:
        poller.join()
    assert [service.object(job.id)["status"] for job in [first, *waiting]] == [
        "succeeded",
        "cancelled",
        "succeeded",
    ]
    placed = [service.object(job.id)["attempts"][0]["created_at"] for job in (first, waiting[1])]
    assert placed[0] < placed[1], "the urgent one went first"


def test_a_job_no_node_can_run_waits_only_when_asked_to(service):
    spec = service.spec("wants-cuda", resources={"device": "cuda"})
    answer = service.http.post("/v1/jobs", json=spec)
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/no-capable-node"
    assert answer.json()["errors"][0]["pointer"] == "/resources"
    assert not list(service.client.jobs.list(name="wants-cuda"))

    answer = service.http.post("/v1/jobs", params={"allow_waiting": "true"}, json=spec)
    assert answer.status_code == 201
    job = service.client.jobs.get(answer.json()["id"])
    service.until(
        lambda: "offers no cuda device" in (job.refresh().data.waiting_for or ""), "the reason"
    )
    check(service.object(job.id))
    assert job.cancel().status == "cancelled"


def test_a_paused_job_goes_on_where_it_was(service, poll):
    job = service.submit("paused", training={"steps": 700})
    poller = poll(job)
    service.step(job, 20)
    answer = service.http.post(f"/v1/jobs/{job.id}/pause")
    assert answer.json()["status"] == "pausing", answer.text
    service.until(lambda: job.refresh().status == "paused", "it is paused")
    reached = job.data.progress.step
    assert 20 <= reached < 700
    assert service.http.post(f"/v1/jobs/{job.id}/resume").json()["status"] == "queued"
    service.end(job)
    poller.join()
    steps = {series.attempt: series.steps for series in job.metrics("train/loss")}
    assert steps[1] + steps[2] == list(range(1, 701)), "no step twice, none left out"


def test_every_change_is_told_to_long_polls_and_streams(service):
    job = service.submit("told", training={"steps": 40})
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(lambda: list(_client(service).jobs.get(job.id).stream()))
        version = 0
        while True:
            answer = service.http.get(
                f"/v1/jobs/{job.id}", params={"wait": 30, "since_version": version}
            )
            found = answer.json()
            assert found["version"] > version, "a long poll ended without a change"
            check(found)
            version = found["version"]
            if found["is_final"]:
                break
        events = stream.result(60)
    assert events[-1].type == "end"
    statuses = [event.data["status"] for event in events if event.type == "status"]
    assert statuses == ["queued", "starting", "running", "succeeded"]
    told = [
        step
        for e in events
        if e.type == "metrics"
        for step, _ in e.data["points"].get("train/loss", [])
    ]
    assert told == list(range(1, 41))
    ids = [event.id for event in events if event.id is not None]
    assert ids == sorted(ids)


def _client(service):
    from octrain.client import Client

    return Client(service.stack.url, service.stack.api_key)
