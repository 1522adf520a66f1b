"""Metrics of nodes: stored once, bounded, thinned; and jobs whose GPUs lie idle."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import pytest

_numbers = itertools.count(1)


def sample(age: float, *uses: float | None, **host: float) -> dict[str, Any]:
    """A sample of GPUs 0, 1, ... with these utilisations."""
    gpus = [
        {"index": index, "memory_bytes": 100 * (index + 1)}
        | ({} if use is None else {"utilization": use})
        for index, use in enumerate(uses)
    ]
    name = f"test-node-{next(_numbers):08d}"
    return {"id": name, "age_seconds": age, "host": host, "gpus": gpus}


async def post(worker: Any, *samples: dict[str, Any]) -> Any:
    return await worker.http.post(
        f"/nodes/{worker.node_id}/metrics", json={"samples": list(samples)}
    )


async def read(user: Any, node_id: str, query: str = "") -> list[dict[str, Any]]:
    answer = await user.get(f"/nodes/{node_id}/metrics{query}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["samples"])


async def test_samples_are_read_back_once_and_in_order(worker: Any, user: Any) -> None:
    first = sample(20, 0.5, None, cpu_utilization=0.25, memory_bytes=5e9)
    second = sample(10, 1.0, 0.0)
    assert (await post(worker, first, second)).json() == {"stored": 2}
    assert (await post(worker, first, second, sample(0, 0.1))).json() == {"stored": 1}
    found = await read(user, worker.node_id)
    assert found[0]["host"] == {"cpu_utilization": 0.25, "memory_bytes": 5e9}
    unknown = {"power_watts": None, "temperature_celsius": None}
    assert found[0]["gpus"] == [
        {"index": 0, "utilization": 0.5, "memory_bytes": 100, **unknown},
        {"index": 1, "utilization": None, "memory_bytes": 200, **unknown},
    ]
    assert [entry["gpus"][0]["utilization"] for entry in found] == [0.5, 1.0, 0.1]
    times = [datetime.fromisoformat(entry["time"]) for entry in found]
    assert 8 < (times[1] - times[0]).total_seconds() < 12
    assert len(await read(user, worker.node_id, "?seconds=15")) == 2


async def test_samples_of_one_moment_are_all_stored(worker: Any, user: Any) -> None:
    assert (await post(worker, sample(5, 0.5), sample(5, 0.7))).json() == {"stored": 2}
    assert len(await read(user, worker.node_id)) == 2


async def test_many_samples_are_means(worker: Any, user: Any) -> None:
    await post(worker, *[sample(100 - n, n / 100, cpu_utilization=n / 100) for n in range(100)])
    found = await read(user, worker.node_id, "?max_points=10")
    assert len(found) == 10
    assert found[0]["gpus"][0]["utilization"] == pytest.approx(0.045)
    assert found[9]["host"]["cpu_utilization"] == pytest.approx(0.945)


async def test_old_samples_go(worker: Any, user: Any, lone_service: Any) -> None:
    await post(worker, sample(0, 0.5), sample(3600.0 * 24 + 1, 0.5))
    assert len(await read(user, worker.node_id, "?seconds=1000000")) == 1
    await lone_service.sql("UPDATE node_samples SET time = time - interval '25 hours'")
    await post(worker, sample(0, 0.7))
    [kept] = await read(user, worker.node_id, "?seconds=1000000")
    assert kept["gpus"][0]["utilization"] == 0.7


async def test_only_its_own_node_may_tell(worker: Any, user: Any, lone_service: Any) -> None:
    path = f"/nodes/{worker.node_id}/metrics"
    other = lone_service.client(await lone_service.key("others", "node"))
    body = {"samples": [sample(0, 0.5)]}
    assert (await other.post(path, json=body)).status_code == 404
    assert (await user.post(path, json=body)).status_code == 403
    assert (await worker.http.post("/nodes/node_none/metrics", json=body)).status_code == 404
    assert (await user.get("/nodes/node_none/metrics")).status_code == 404
    odd = sample(0, 1.5)
    assert (await post(worker, odd)).status_code == 422


@pytest.fixture
async def gpu_job(worker: Any, user: Any, submit: Any) -> Any:
    """A function that has the worker take a job on its two GPUs, with this limit."""
    ok = {"ok": True, "reasons": [], "version": None}
    gpus = [
        {"index": n, "name": "H200", "memory_bytes": 1 << 37, "compute_capability": "9.0"}
        for n in range(2)
    ]
    await worker.register(
        device_kinds=["cuda"], cpu_slots=0, gpus=gpus, engines={"amp": ok, "emulated": ok}
    )

    async def take(limit: int | None, gpus: int = 1) -> str:
        job_id = await submit(
            user,
            resources={"device": "cuda", "gpus": gpus},
            limits={"idle_gpu_timeout_seconds": limit},
        )
        await worker.take(job_id)
        return str(job_id)

    return take


async def idle_for(worker: Any, service: Any, seconds: int, *uses: float | None) -> None:
    """Samples of ten seconds each, as the node sends them, while the clock runs."""
    for _ in range(0, seconds, 10):
        await service.advance(10)
        await service.sql(
            "UPDATE gpu_activity SET seen_at = seen_at - interval '10 s', "
            "busy_at = busy_at - interval '10 s'"
        )
        assert (await post(worker, sample(0, *uses))).status_code == 200
    await worker.post("heartbeat", step=1)
    await worker.reconcile()


async def job_of(user: Any, job_id: str) -> dict[str, Any]:
    return dict((await user.get(f"/jobs/{job_id}")).json())


async def test_a_job_whose_gpu_lies_idle_is_stopped(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any
) -> None:
    job_id = await gpu_job(60)
    await idle_for(worker, lone_service, 60, 0.009, 1.0)
    assert (await job_of(user, job_id))["status"] == "starting", "for fifty seconds"
    await idle_for(worker, lone_service, 20, 0.009, 1.0)
    job = await job_of(user, job_id)
    assert (job["status"], job["reason"]) == ("cancelling", "gpu_idle")
    answer = (await worker.post("heartbeat", step=1)).json()
    assert (answer["wanted"], answer["wanted_reason"]) == ("cancel", "gpu_idle")
    await worker.finish("stopped", "cancelled_by_user", step=1)
    job = await job_of(user, job_id)
    assert (job["status"], job["reason"]) == ("failed", "gpu_idle")
    assert "60 s" in job["detail"]
    assert job["attempts"][0]["reason"] == "gpu_idle"


@pytest.mark.parametrize("uses", [(0.01, 0.0), (None, 0.0), (1.0, 0.0)])
async def test_a_gpu_at_work_or_unknown_is_not_idle(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any, uses: tuple[float | None, ...]
) -> None:
    job_id = await gpu_job(60)
    await idle_for(worker, lone_service, 200, *uses)
    assert (await job_of(user, job_id))["status"] == "starting"


async def test_several_gpus_are_idle_when_all_are(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any
) -> None:
    job_id = await gpu_job(60, gpus=2)
    await idle_for(worker, lone_service, 100, 0.0, 0.5)
    await idle_for(worker, lone_service, 200, 0.0, None)
    assert (await job_of(user, job_id))["status"] == "starting"
    await idle_for(worker, lone_service, 80, 0.0, 0.0)
    assert (await job_of(user, job_id))["reason"] == "gpu_idle"


async def test_without_the_limit_nothing_happens(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any
) -> None:
    job_id = await gpu_job(None)
    await idle_for(worker, lone_service, 200, 0.0, 0.0)
    assert (await job_of(user, job_id))["status"] == "starting"


async def test_a_time_without_samples_is_not_idle(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any
) -> None:
    job_id = await gpu_job(60)
    await idle_for(worker, lone_service, 30, 0.0)
    await lone_service.advance(600)
    await lone_service.sql(
        "UPDATE gpu_activity SET seen_at = seen_at - interval '600 s', "
        "busy_at = busy_at - interval '600 s'"
    )
    await idle_for(worker, lone_service, 30, 0.0)
    assert (await job_of(user, job_id))["status"] == "starting"
    await idle_for(worker, lone_service, 30, 0.0)
    assert (await job_of(user, job_id))["reason"] == "gpu_idle"


async def test_kept_samples_of_an_outage_count_by_their_own_time(
    worker: Any, user: Any, lone_service: Any, gpu_job: Any
) -> None:
    job_id = await gpu_job(60)
    await lone_service.advance(200)
    await post(worker, *[sample(150 - 10 * n, 0.5 if n == 5 else 0.0) for n in range(8)])
    await worker.post("heartbeat", step=1)
    await worker.reconcile()
    assert (await job_of(user, job_id))["status"] == "starting"
    await post(worker, *[sample(70 - 10 * n, 0.0) for n in range(8)])
    await worker.reconcile()
    assert (await job_of(user, job_id))["reason"] == "gpu_idle"
