"""Which checkpoints stay registered, and what nodes are told to remove from their stores."""

from __future__ import annotations

from typing import Any


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "size": 1, "sha256": "0" * 64}


async def _register(worker: Any, step: int, **more: Any) -> str:
    name = f"step-{step:08d}"
    body = {
        "kind": "checkpoint",
        "name": name,
        "step": step,
        "url": f"{_store(worker)}/{worker.attempt['artifact_prefix']}/checkpoints/{name}",
        "files": [_file("state.json"), _file("manifest.json")],
    }
    answer = await worker.post("artifacts", **body | more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["artifact_id"])


def _store(worker: Any) -> str:
    return str(worker.service.settings.storage.artifact_url)


async def _steps(user: Any, job_id: str) -> list[tuple[int, int]]:
    """(attempt, step) of every registered checkpoint."""
    items = (await user.get(f"/jobs/{job_id}/artifacts?kind=checkpoint")).json()["items"]
    return [(item["attempt"], item["step"]) for item in items]


async def _beat(worker: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["leftovers"])


async def test_the_newest_and_the_best_stay_over_all_attempts(
    worker: Any, user: Any, submit: Any
) -> None:
    keep = {"keep_last": 2, "keep_best": 1}
    job_id = await submit(user, checkpoint=keep, limits={"restart_backoff_seconds": 0})
    await worker.take(job_id)
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, "NaN")):
        await _register(worker, step, metric=loss)
    assert await _steps(user, job_id) == [(1, 20), (1, 30), (1, 40)]
    await worker.finish("failed", "trainer_crashed", step=45, resumable=True)

    # The next attempt repeats step 40, and is worse than the first one's best.
    claim = await worker.take(job_id)
    assert [one["step"] for one in claim["resume_candidates"]] == [40, 30, 20]
    await _register(worker, 40, metric=2.4)
    assert await _steps(user, job_id) == [(1, 20), (1, 30), (2, 40)]
    await _register(worker, 50)
    assert await _steps(user, job_id) == [(1, 20), (2, 40), (2, 50)]
    await _register(worker, 60, metric=1.5)
    assert await _steps(user, job_id) == [(2, 50), (2, 60)]
    events = (await user.get(f"/jobs/{job_id}/events?limit=100")).json()["items"]
    removed = [(e["attempt"], e["data"]["step"]) for e in events if e["kind"] == "artifact_removed"]
    assert removed == [(1, 10), (1, 40), (1, 30), (2, 40), (1, 20)]


async def test_the_same_registration_twice_prunes_once(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user, checkpoint={"keep_last": 1, "keep_best": 0})
    await worker.take(job_id)
    await _register(worker, 10)
    second = await _register(worker, 20)
    assert await _register(worker, 20) == second
    assert await _steps(user, job_id) == [(1, 20)]


async def test_damaged_checkpoints_displace_none(worker: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user, checkpoint={"keep_last": 1, "keep_best": 0})
    await worker.take(job_id)
    torn = await _register(worker, 30)
    record = {"type": "event", "kind": "checkpoint_torn", "data": {"artifact_id": torn}}
    await worker.telemetry(1, record)
    await _register(worker, 10)
    await _register(worker, 20)
    assert await _steps(user, job_id) == [(1, 30), (1, 20)]


async def test_files_go_once_their_node_is_told(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user, checkpoint={"keep_last": 1, "keep_best": 0})
    await worker.take(job_id)
    await _register(worker, 10)
    await _register(worker, 20)
    assert await _beat(worker) == [], "somebody may be reading it"
    await lone_service.advance(61)
    (order,) = await _beat(worker)
    prefix = f"{_store(worker)}/{worker.attempt['artifact_prefix']}"
    assert order["url"] == f"{prefix}/checkpoints/step-00000010"
    assert order["keep"] == []
    assert await _beat(worker) == [order], "told until it is done"
    assert await _beat(worker, removed=[order["id"]]) == []


async def test_what_an_ended_attempt_never_registered_goes(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user)
    await worker.take(job_id)
    prefix = f"{_store(worker)}/{worker.attempt['artifact_prefix']}"
    await _register(worker, 10)
    model = {"kind": "model", "name": "model", "url": f"{prefix}/model"}
    await worker.post("artifacts", files=[_file("config.json")], **model)
    report = {"kind": "report", "name": "report.json", "url": prefix}
    await worker.post("artifacts", files=[_file("report.json")], **report)
    await worker.finish("succeeded", "completed", step=10)
    assert await _beat(worker) == []
    await lone_service.advance(3601)
    (order,) = await _beat(worker)
    assert order["url"] == prefix
    assert order["keep"] == [
        "checkpoints/step-00000010.manifest.json",
        "checkpoints/step-00000010/manifest.json",
        "checkpoints/step-00000010/state.json",
        "model.manifest.json",
        "model/config.json",
        "report.json",
    ]


async def test_a_private_store_is_only_its_nodes(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register(private_roots=True)
    job_id = await submit(user, checkpoint={"keep_last": 1, "keep_best": 0})
    await worker.take(job_id)
    await _register(worker, 10)
    await _register(worker, 20)
    await lone_service.advance(61)
    first = worker.node_id
    await worker.register("node-b", private_roots=True)
    assert await _beat(worker) == []
    worker.node_id = first
    await worker.speak_for("node-a")
    (order,) = await _beat(worker)
    # Another store is none of its business either.
    await worker.register(private_roots=True, artifact_url="file:///elsewhere")
    assert await _beat(worker, removed=[order["id"]]) == []
    await worker.register(private_roots=True)
    assert await _beat(worker) == [order]
