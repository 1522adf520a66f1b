"""Who watches a job misses nothing, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octrain.client import Client, StreamEvent

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_streams_outlive_broker_api_and_database(service: Any) -> None:
    """Valkey is emptied by its death, the API is killed, Postgres crashes: three readers go on."""
    job = service.submit("watched", training={"steps": 100_000})

    def reader() -> Client:
        return Client(service.stack.url, service.stack.api_key)

    def stream() -> list[StreamEvent]:
        with reader() as client:
            return list(client.jobs.get(job.id).stream())

    def events() -> list[StreamEvent]:
        found = []
        with reader() as client:
            for event in client.events(after=0):
                if event.data.get("job_id") == job.id:
                    found.append(event)
                    if event.data.get("status") == "cancelled":
                        return found
        raise AssertionError("the stream of all jobs has no end of its own")

    def lines() -> list[int]:
        with reader() as client:
            return [line.seq for line in client.jobs.get(job.id).follow_logs()]

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(one) for one in (stream, events, lines)]
        service.step(job, 20)
        for name, number in (("valkey", signal.SIGKILL), ("api", signal.SIGKILL)):
            process = service.stack.process(name)
            os.kill(process.pid, number)
            service.until(lambda p=process: not p.running, f"{name} is dead", 20)
            service.stack.restart(name)
        service.until(service.stack.is_ready, "the API is well again", 60)
        service.step(job, service.local_step(job))
        postgres = service.stack.process("postgres")
        os.kill(postgres.pid, signal.SIGQUIT)
        service.until(lambda: not postgres.running, "Postgres is gone", 30)
        service.stack.restart("postgres")
        service.until(service.stack.is_ready, "the API is well again", 60)
        service.step(job, service.local_step(job))
        job.cancel()
        service.end(job, "cancelled")
        told, of_all, numbers = (one.result(120) for one in reading)
    ids = [event.id for event in told if event.type not in ("progress", "end", "log")]
    newest = job.refresh().data.last_event
    assert {"gap", "reset"} & {event.type for event in told} == set()
    # Lines carry an id only as the last of their batch; parsers keep the one before.
    with_logs = {event.id for event in told}
    assert [number for number in ids if number is not None] == sorted(set(ids))
    assert with_logs >= set(range(1, newest + 1)), "every number was told"
    steps = [step for event in told if event.type == "metrics" for step in _steps(event)]
    assert steps == list(range(1, steps[-1] + 1)), "each step once, in order"
    stored = [(one["seq"], one["kind"]) for one in service.events(job.id)]
    # In the order of transactions, which is nearly that of the job.
    seen = sorted((event.data["seq"], event.data["kind"]) for event in of_all)
    assert seen == stored[: len(seen)]
    assert numbers == list(range(1, len(numbers) + 1))


def _steps(event: StreamEvent) -> list[int]:
    return [step for step, _ in event.data["points"].get("train/loss", [])]
