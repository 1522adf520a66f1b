"""Redis, Postgres or both are away, empty or frozen: no job is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
import redis

pytestmark = pytest.mark.e2e


def test_redis_is_away(service):
    valkey = service.stack.process("valkey")
    os.kill(valkey.pid, signal.SIGKILL)
    service.until(lambda: not valkey.running, "Valkey is dead", 10)
    answer = service.http.post("/v1/jobs", json=service.spec("without-redis"))
    assert answer.status_code == 201, answer.text
    job = service.client.jobs.get(answer.json()["id"])
    service.until(lambda: job.refresh().status == "starting", "it is placed", 30)
    assert service.http.get("/readyz").status_code == 200, "the API does not need Redis"
    service.stack.restart("valkey")
    service.end(job)
    assert [attempt.number for attempt in job.data.attempts] == [1]


def test_redis_hangs(service):
    """It takes connections and answers nothing, which is worse than being away."""
    valkey = service.stack.process("valkey")
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        answer = service.http.post("/v1/jobs", json=service.spec("redis-hangs"), timeout=5)
        assert answer.status_code == 201, answer.text
        job = service.client.jobs.get(answer.json()["id"])
        service.until(lambda: job.refresh().status == "starting", "it is placed", 30)
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    service.end(job)


def test_redis_forgets_everything(service):
    running = service.submit("keeps-on", training={"steps": 300})
    service.step(running, 20)
    waiting = service.submit("comes-through")
    with redis.Redis.from_url(service.stack.redis_url) as server:
        server.flushall()
    for job in (running, waiting):
        service.end(job)
        assert [attempt.reason for attempt in job.data.attempts] == ["completed"]


def test_postgres_restarts_under_load(service):
    """Answers are the job, or 503 with Retry-After; no 500, nothing stored twice, none lost."""
    job = service.submit("rides-it-out", training={"steps": 100_000})
    service.step(job, 20)
    trainer = service.trainer(job)
    spec = service.spec("under-load", resources={"device": "cuda"})
    stop = threading.Event()

    def load(number: int) -> list[tuple[int, str | None]]:
        seen = []
        with httpx.Client(
            base_url=service.stack.url, headers=dict(service.http.headers), trust_env=False
        ) as http:
            turn = 0
            while not stop.wait(0.05):
                turn += 1
                key = f"load-{number}-{turn}"
                try:
                    answer = http.post(
                        "/v1/jobs",
                        params={"allow_waiting": True},
                        json=spec,
                        headers={"Idempotency-Key": key},
                        timeout=60,
                    )
                except httpx.TransportError as error:
                    pytest.fail(f"the API hung up: {error!r}")
                seen.append((answer.status_code, answer.json().get("id")))
                if answer.status_code == 503:
                    assert answer.headers["Retry-After"]
                    assert answer.json()["type"] == "/problems/database-unavailable"
        return seen

    postgres = service.stack.process("postgres")
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, number) for number in range(4)]
        try:
            service.until(lambda: any(service.client.jobs.list(name="under-load")), "load", 30)
            os.kill(postgres.pid, signal.SIGQUIT)  # an immediate shutdown: like a crash
            service.until(lambda: not postgres.running, "Postgres is gone", 30)
            service.until(
                lambda: service.http.get("/readyz").status_code == 503, "the API says so", 30
            )
            service.stack.restart("postgres")
            service.until(service.stack.is_ready, "the API is well again", 30)
            before = service.local_step(job)
            service.until(lambda: job.refresh().data.progress.step > before, "telemetry goes on")
        finally:
            stop.set()
        seen = [item for one in loads for item in one.result(90)]
    assert {status for status, _ in seen} == {201, 503}
    stored = list(service.client.jobs.list(name="under-load"))
    # An answer may be lost with the connection, its job then stands; a 201 always stands.
    answered = [made for status, made in seen if status == 201]
    assert len(answered) == len(set(answered))
    assert set(answered) <= {queued.id for queued in stored}
    assert service.trainer(job) == trainer
    for queued in stored:
        assert queued.cancel().status == "cancelled"
    job.cancel()
    service.end(job, "cancelled")
    (series,) = job.metrics("train/loss")
    assert series.steps == list(range(1, series.steps[-1] + 1)), "twice, or left out"


def test_a_network_that_swallows_the_first_bytes(service):
    """Connections that open and say nothing hold up nobody else."""
    place = urlsplit(service.stack.url)
    idle = [socket.create_connection((place.hostname, place.port)) for _ in range(100)]
    try:
        for connection in idle[:50]:
            connection.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"
            )
        assert service.http.get("/readyz", timeout=5).status_code == 200
        job = service.submit("beside-slow-ones")
        assert job.cancel().status in {"cancelled", "cancelling"}
        service.end(job, "cancelled")
    finally:
        for connection in idle:
            connection.close()
