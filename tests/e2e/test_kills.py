"""SIGKILL of every part of the service while a job runs: the job ends right all the same."""

from __future__ import annotations

import os
import signal

import pytest

from octrain.local.processes import is_alive

pytestmark = pytest.mark.e2e

STEPS = 500
SPEC = {
    "training": {"steps": STEPS},
    "checkpoint": {"every_steps": 50, "keep_last": 2},
    "limits": {"max_restarts": 2},
}


def trained_once(job, attempts: int) -> None:
    """The steps that count follow one another, and each was stored once in its attempt."""
    series = {s.attempt: s.steps for s in job.metrics("train/loss")}
    assert sorted(series) == list(range(1, attempts + 1))
    for steps in series.values():
        assert steps == list(range(steps[0], steps[-1] + 1)), "twice, or left out"
    for number in range(2, attempts + 1):
        # The run goes on from a checkpoint: behind what was reached, never behind its beginning.
        assert 1 < series[number][0] <= series[number - 1][-1] + 1
    assert series[attempts][-1] == STEPS


def kinds(service, job) -> list[str]:
    return [event["kind"] for event in service.events(job.id)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_the_trainer(service):
    job = service.submit("trainer-killed", **SPEC)
    service.step(job, 60)
    service.until(lambda: "checkpoint" in {a.kind for a in job.artifacts()}, "a checkpoint")
    kill(service.trainer(job))
    service.end(job)
    first, second = job.data.attempts
    assert (first.reason, second.reason) == ("trainer_crashed", "completed")
    assert "SIGKILL" in (first.detail or "")
    trained_once(job, 2)


def test_the_supervisor(service):
    job = service.submit("supervisor-killed", **SPEC)
    service.step(job, 60)
    service.until(lambda: "checkpoint" in {a.kind for a in job.artifacts()}, "a checkpoint")
    trainer = service.trainer(job)
    kill(service.supervisor(job))
    service.until(lambda: not is_alive(trainer), "the trainer dies with its supervisor", 10)
    service.end(job)
    first, second = job.data.attempts
    assert (first.reason, second.reason) == ("worker_lost", "completed")
    trained_once(job, 2)


def test_the_celery_worker_and_the_controller(service):
    """Training is not interrupted: the same trainer goes on, in the same attempt."""
    job = service.submit("worker-killed", **SPEC)
    service.step(job, 20)
    trainer = service.trainer(job)
    stack = service.stack
    for name in ("worker-local", "controller"):
        process = stack.process(name)
        kill(process.pid)
        service.until(lambda process=process: not process.running, f"{name} is dead", 10)
    reached = service.local_step(job)
    service.until(lambda: service.local_step(job) > reached + 20, "training goes on alone")
    for name in ("worker-local", "controller"):
        stack.restart(name)
    assert is_alive(trainer)
    service.until(lambda: job.refresh().data.progress.step > reached + 20, "it is told")
    service.end(job)
    assert [attempt.reason for attempt in job.data.attempts] == ["completed"]
    assert job.data.restarts == 0
    trained_once(job, 1)


@pytest.mark.slow
def test_the_trainer_while_the_controller_is_dead(service):
    """Nobody can place the job again until there is a controller; then it is."""
    job = service.submit("both-killed", **SPEC)
    service.step(job, 60)
    service.until(lambda: "checkpoint" in {a.kind for a in job.artifacts()}, "a checkpoint")
    kill(service.stack.process("controller").pid)
    kill(service.trainer(job))
    service.until(lambda: job.refresh().status == "queued", "it goes back to the queue")
    service.stack.restart("controller")
    service.end(job)
    trained_once(job, 2)


def test_the_api_when_the_trainer_ends_meanwhile(service):
    job = service.submit("ends-unheard", training={"steps": 300})
    service.step(job, 20)
    kill(service.stack.process("api").pid)
    result = service.attempt_folder_known(job) / "work" / "result.json"
    service.until(result.exists, "the trainer ends without the API", 60)
    service.stack.restart("api")
    service.until(service.stack.is_ready, "the API answers again", 30)
    service.end(job)
    assert [attempt.reason for attempt in job.data.attempts] == ["completed"]
    (series,) = job.metrics("train/loss")
    assert series.steps == list(range(1, 301))
    assert {"model", "report"} <= {artifact.kind for artifact in job.artifacts()}
