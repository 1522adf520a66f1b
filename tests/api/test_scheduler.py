"""Placement: which node, in which order, and the words for why not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from octrain_api.controller.placement import Candidate, Placement, choose, never_fits
from octrain_api.controller.scheduler import schedule

OK = {"ok": True}


@dataclass
class _Node:
    name: str
    device_kinds: list[str] = field(default_factory=lambda: ["cpu"])
    cpu_slots: int = 1
    gpus: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=lambda: {"emulated": OK})

    @property
    def id(self) -> str:
        return f"node_{self.name}"


def _gpu_node(name: str, count: int, **engines: Any) -> _Node:
    return _Node(
        name,
        ["cpu", "cuda"],
        gpus=[{"index": index} for index in range(count)],
        engines=engines or {"te": OK, "emulated": OK},
    )


def _spec(device: str = "auto", gpus: int = 1, engine: str = "emulated") -> dict[str, Any]:
    return {"resources": {"device": device, "gpus": gpus}, "recipe": {"engine": engine}}


def _choose(spec: Any, *candidates: Candidate, **more: Any) -> Placement | str:
    more.setdefault("registered", [c.node for c in candidates])
    return choose(spec, candidates, **more)


def test_auto_is_cuda_where_any_node_has_it() -> None:
    cpu, gpu = Candidate(_Node("a")), Candidate(_gpu_node("b", 2))
    assert _choose(_spec(), cpu) == Placement("node_a", "cpu", [])
    assert _choose(_spec(), cpu, gpu) == Placement("node_b", "cuda", [0])
    gpu.gpus_used = {0, 1}
    waits = _choose(_spec(), cpu, gpu)
    assert isinstance(waits, str)
    assert waits.startswith("1 free GPU(s): b has 0 of 2 GPU(s) free")
    assert _choose(_spec("cpu"), cpu, gpu) == Placement("node_a", "cpu", [])
    # The only GPU node is away for the moment: the job waits for it all the same.
    assert isinstance(_choose(_spec(), cpu, registered=[cpu.node, gpu.node]), str)


def test_gpus_are_taken_from_the_fullest_node_that_fits() -> None:
    large, small = Candidate(_gpu_node("large", 8)), Candidate(_gpu_node("small", 2))
    assert _choose(_spec(), large, small) == Placement("node_small", "cuda", [0])
    assert _choose(_spec(gpus=4), large, small) == Placement("node_large", "cuda", [0, 1, 2, 3])
    large.gpus_used = {0, 2}
    assert _choose(_spec(gpus=4), large, small) == Placement("node_large", "cuda", [1, 3, 4, 5])


def test_refusals_say_what_is_missing() -> None:
    node = _Node("a", engines={"te": {"ok": False, "reasons": ["no CUDA device"]}})
    assert "no CUDA device" in str(_choose(_spec(engine="te"), Candidate(node)))
    assert "does not know the engine 'torchao'" in str(
        _choose(_spec(engine="torchao"), Candidate(node))
    )
    assert "offers no cuda device" in str(_choose(_spec("cuda"), Candidate(node)))
    assert never_fits(_spec(), []) is None
    assert never_fits(_spec(), [node]) is not None
    assert never_fits(_spec(gpus=4, device="cuda"), [_gpu_node("g", 2)]) == [
        "g has 2 GPU(s), not 4"
    ]
    busy = Candidate(_Node("a"), cpu_used=1)
    assert _choose(_spec(), busy) == "a free CPU slot: a has all 1 CPU slot(s) in use"
    assert never_fits(_spec(), [busy.node]) is None
    assert "none is registered" in str(choose(_spec(), [], registered=[]))
    assert "none of the registered" in str(choose(_spec(), [], registered=[_Node("a")]))


def test_a_node_that_failed_comes_last_and_a_pin_binds() -> None:
    a, b = Candidate(_Node("a")), Candidate(_Node("b"))
    assert _choose(_spec(), a, b, avoid=["node_a"]) == Placement("node_b", "cpu", [])
    assert _choose(_spec(), a, avoid=["node_a"]) == Placement("node_a", "cpu", [])
    assert _choose(_spec(), a, b, pinned="node_b") == Placement("node_b", "cpu", [])
    assert "its node" in str(_choose(_spec(), a, b, pinned="node_c"))


async def test_priority_then_age(worker: Any, user: Any, submit: Any) -> None:
    await worker.register(cpu_slots=2)
    low = await submit(user, priority=-1)
    old, young, late = await submit(user), await submit(user), await submit(user)
    high = await submit(user, priority=5)
    assert await worker.schedule() == 2
    jobs = {j["id"]: j for j in (await user.get("/jobs")).json()["items"]}
    assert {i for i, job in jobs.items() if job["status"] == "starting"} == {high, old}
    for waiting in (young, late, low):
        assert (
            jobs[waiting]["waiting_for"] == "a free CPU slot: node-a has all 2 CPU slot(s) in use"
        )
    assert jobs[high]["waiting_for"] is None
    assert jobs[high]["device"] == "cpu"
    assert await worker.schedule() == 0


async def test_what_a_job_waits_for_is_news_once(worker: Any, user: Any, submit: Any) -> None:
    await submit(user)
    waiting = await submit(user)
    await worker.schedule()
    version = (await user.get(f"/jobs/{waiting}")).json()["version"]
    await worker.schedule()
    assert (await user.get(f"/jobs/{waiting}")).json()["version"] == version


async def test_two_schedulers_at_once_place_each_job_once(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register(cpu_slots=3)
    for _ in range(6):
        await submit(user)
    settings = lone_service.settings.controller
    await asyncio.gather(*(schedule(lone_service.database, settings) for _ in range(4)))
    rows = await lone_service.sql("SELECT job_id, fencing_token FROM attempts")
    assert len(rows) == len({row.job_id for row in rows}) == 3
    assert len({row.fencing_token for row in rows}) == 3
    assert len(await lone_service.sql("SELECT 1 FROM outbox")) == 3


async def test_silent_and_draining_nodes_get_nothing(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    job_id = await submit(user)
    await lone_service.sql("UPDATE nodes SET wanted = 'drain'")
    assert await worker.schedule() == 0
    heartbeat = await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={})
    assert heartbeat.json() == {"wanted": "drain"}
    await lone_service.sql(
        "UPDATE nodes SET wanted = 'run', last_heartbeat_at = now() - interval '31 seconds'"
    )
    assert await worker.schedule() == 0
    assert "none of the registered" in (await user.get(f"/jobs/{job_id}")).json()["waiting_for"]
    await worker.http.post(f"/nodes/{worker.node_id}/heartbeat", json={"active_attempts": []})
    assert await worker.schedule() == 1


async def test_private_checkpoints_bind_a_job_to_its_node(
    worker: Any, user: Any, submit: Any, lone_service: Any
) -> None:
    await worker.register("private", private_roots=True)
    await lone_service.sql("UPDATE nodes SET wanted = 'drain' WHERE name = 'node-a'")
    job_id = await submit(user)
    await worker.take(job_id)
    store = lone_service.settings.storage.artifact_url
    await worker.post(
        "artifacts",
        kind="checkpoint",
        name="step-00000005",
        step=5,
        url=f"{store}/{worker.attempt['artifact_prefix']}/checkpoints/step-00000005",
        files=[{"path": "x", "size": 1, "sha256": "0" * 64}],
    )
    await worker.finish("stopped", "stopped_by_request", step=5)
    await lone_service.sql(
        "UPDATE nodes SET wanted = CASE name WHEN 'node-a' THEN 'run' ELSE 'drain' END"
    )
    assert await worker.schedule() == 0
    assert "its node" in (await user.get(f"/jobs/{job_id}")).json()["waiting_for"]
    await lone_service.sql("UPDATE nodes SET wanted = 'run'")
    assert await worker.schedule() == 1


async def test_nodes_are_listed_with_what_is_free(worker: Any, user: Any, running_job: str) -> None:
    await worker.register(
        "gpu",
        device_kinds=["cpu", "cuda"],
        gpus=[{"index": 0, "name": "H200", "memory_bytes": 1, "compute_capability": "9.0"}],
    )
    nodes = {node["name"]: node for node in (await user.get("/nodes")).json()["items"]}
    assert (nodes["node-a"]["live"], nodes["node-a"]["cpu_slots_used"]) == (True, 1)
    assert nodes["node-a"]["engines"]["te"]["ok"] is False
    assert (nodes["gpu"]["gpus"][0]["name"], nodes["gpu"]["gpus_used"]) == ("H200", [])
