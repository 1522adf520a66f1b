"""SIGKILL of every part of the service while a job runs: the job ends right all the same."""

from __future__ import annotations

import os
import signal

import pytest

from octrain.client import Job
from octrain.local.processes import is_alive
from tests.running_service import Service

pytestmark = pytest.mark.e2e


def has_trained_once(job: Job, attempts: int) -> None:
    """The steps that count follow one another, and each was stored once in its attempt."""
    series = {s.attempt: s.steps for s in job.metrics("train/loss")}
    assert sorted(series) == list(range(1, attempts + 1))
    for steps in series.values():
        assert steps == list(range(steps[0], steps[-1] + 1)), "twice, or left out"
    for number in range(2, attempts + 1):
        # The run goes on from a checkpoint: behind what was reached, never behind its beginning.
        assert 1 < series[number][0] <= series[number - 1][-1] + 1


def losses(job: Job) -> list[tuple[int, float]]:
    """Of each step the value that counts."""
    return [point for series in job.metrics("train/loss") for point in series.points]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_process(service: Service, *names: str) -> None:
    for name in names:
        process = service.stack.process(name)
        kill(process.pid)
        service.until(lambda process=process: not process.running, f"{name} is dead", 10)


def has_stored_a_checkpoint(service: Service, job: Job, step: int) -> None:
    """Wait until the job's newest attempt has trained so many steps and stored a checkpoint."""
    service.step(job, step)
    attempt = len(job.data.attempts)
    service.until(
        lambda: ("checkpoint", attempt) in {(a.kind, a.attempt) for a in job.artifacts()},
        f"a checkpoint of attempt {attempt}",
    )


def test_the_trainer_and_then_the_supervisor(service: Service) -> None:
    """Each costs the job one attempt; the third one brings it to its end, and to the numbers that
    it had come to undisturbed: data, schedule and the state of FP8 went on where they were."""
    steps = 1000
    parts = {
        "training": {"steps": steps, "seed": 11},
        "checkpoint": {"every_steps": 40, "keep_last": 2},
        "limits": {"max_restarts": 2, "restart_backoff_seconds": 0},
    }
    job = service.submit("killed-twice", **parts)
    has_stored_a_checkpoint(service, job, 45)
    kill(service.trainer(job))
    service.until(lambda: len(job.refresh().data.attempts) == 2, "a second attempt")
    has_stored_a_checkpoint(service, job, job.data.progress.step + 1)
    trainer = service.trainer(job)
    kill(service.supervisor(job))
    service.until(lambda: not is_alive(trainer), "the trainer dies with its supervisor", 10)
    service.end(job)
    reasons = [attempt.reason for attempt in job.data.attempts]
    assert reasons == ["trainer_crashed", "worker_lost", "completed"]
    assert "SIGKILL" in (job.data.attempts[0].detail or "")
    has_trained_once(job, 3)
    assert job.metrics("train/loss")[-1].steps[-1] == steps
    undisturbed = service.end(service.submit("undisturbed", **parts))
    assert losses(job) == losses(undisturbed)
    assert len(losses(job)) == steps


def test_the_celery_worker_the_controller_and_the_api(service: Service) -> None:
    """None of them interrupts training. A trainer that dies meanwhile is replaced once there is a
    controller again.
    """
    job = service.submit(
        "outlives-them",
        training={"steps": 100_000},
        checkpoint={"every_steps": 40, "keep_last": 2},
        limits={"restart_backoff_seconds": 0},
    )
    has_stored_a_checkpoint(service, job, 45)
    trainer = service.trainer(job)
    kill_process(service, "worker-local", "controller")
    reached = service.local_step(job)
    service.until(lambda: service.local_step(job) > reached + 20, "training goes on alone")
    service.until(lambda: job.refresh().data.progress.step > reached + 20, "it is told")
    service.stack.restart("worker-local")
    assert is_alive(trainer)
    assert [attempt.status for attempt in job.data.attempts] == ["running"]
    kill(trainer)
    service.until(lambda: job.refresh().status == "queued", "it goes back to the queue")
    service.stack.restart("controller")
    service.until(lambda: len(job.refresh().data.attempts) == 2, "a second attempt")
    service.step(job, job.data.progress.step + 1)

    # A minute without the API, in short: a supervisor's pauses between two tries have grown to
    # their longest after seven seconds, and after ten it says that the API is away. Later nothing
    # changes any more; a real minute is among the slow tests (tests/faults/test_outages.py).
    trainer, supervisor = service.trainer(job), service.supervisor(job)
    kill_process(service, "api")
    log = service.stack.worker_data_dir("local") / "supervisors.log"
    service.until(
        lambda: any(
            f" {supervisor} " in line and "the API is away" in line
            for line in log.read_text().splitlines()
        ),
        "the supervisor misses the API",
    )
    reached = service.local_step(job)
    service.until(lambda: service.local_step(job) > reached, "training goes on without the API")
    service.stack.restart("api")
    service.until(service.stack.is_ready, "the API answers again", 30)
    service.until(lambda: job.refresh().data.progress.step > reached, "it is told the rest")
    assert is_alive(trainer)
    service.until(
        lambda: "api_was_unreachable" in {event["kind"] for event in service.events(job.id)},
        "the job's history tells of it",
    )
    assert job.cancel().status == "cancelling"
    service.end(job, "cancelled")
    reasons = [attempt.reason for attempt in job.data.attempts]
    assert reasons == ["trainer_crashed", "cancelled_by_user"]
    assert job.data.restarts == 1
    has_trained_once(job, 2)
    assert job.metrics("train/loss")[-1].steps[-1] >= reached


def test_the_api_when_the_trainer_ends_meanwhile(service: Service) -> None:
    job = service.submit("ends-unheard", training={"steps": 300})
    service.step(job, 20)
    kill_process(service, "api")
    result = service.attempt_folder_known(job) / "work" / "result.json"
    service.until(result.exists, "the trainer ends without the API", 60)
    service.stack.restart("api")
    service.until(service.stack.is_ready, "the API answers again", 30)
    service.end(job)
    assert [attempt.reason for attempt in job.data.attempts] == ["completed"]
    (series,) = job.metrics("train/loss")
    assert series.steps == list(range(1, 301))
    assert {"model", "report"} <= {artifact.kind for artifact in job.artifacts()}
