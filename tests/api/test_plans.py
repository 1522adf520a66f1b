"""POST /jobs:validate: what is wrong, which nodes fit, and a plan that a node works out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octrain_api.plans.key import plan_key
from octrain_api.plans.repository import PlanRepository
from octrain_api.plans.warnings import of_plan

PLAN = {
    "parameters": {"total": 10, "trainable": 10, "embedding": 2},
    "conversion": {"layers": 2, "converted": 1, "kept": 1, "kept_because": {"why": 1}, "rows": []},
    "memory": {"weights": 40, "total": 2**30},
    "flops": {"total": 9, "gemm": 8, "attention": 1, "fp8_share": 0.9, "formula": "x"},
    "tokens_per_step": 256,
}


async def take(worker: Any, wait: float = 0) -> dict[str, Any] | None:
    answer = await worker.http.post(f"/nodes/{worker.node_id}/plans:take?wait={wait}", json={})
    assert answer.status_code == 200, answer.text
    question: dict[str, Any] | None = answer.json()["question"]
    return question


async def tell(worker: Any, key: str, **body: Any) -> bool:
    answer = await worker.http.post(f"/nodes/{worker.node_id}/plans/{key}", json=body)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["stored"])


async def test_a_node_plans_while_the_asker_waits(worker: Any, user: Any, spec: Any) -> None:
    asking = asyncio.create_task(user.post("/jobs:validate?wait=30", json=spec))
    question = await take(worker, wait=20)
    assert question is not None
    assert question["owner"] == "ada"
    assert question["spec"]["recipe"]["margin"] == 0, "every default is filled in"
    assert await tell(worker, question["key"], result=PLAN)
    report = (await asking).json()
    assert report["valid"] is True
    assert report["errors"] == []
    assert report["plan_status"] == "ready"
    assert report["plan"] == PLAN
    assert report["nodes"] == [
        {"node": "node-a", "fits": True, "reason": None, "is_live": True, "free": True}
    ]
    assert "emulated" in [warning["code"] for warning in report["warnings"]]
    assert (await user.get("/jobs")).json()["items"] == [], "nothing is stored as a job"

    # The same question is answered from memory, whatever else the job's name is.
    again = (await user.post("/jobs:validate?wait=0", json=spec | {"name": "other"})).json()
    assert again["plan"] == PLAN
    assert await take(worker) is None
    # Another batch size is another question, and another owner's files are other files.
    larger = spec | {"training": spec["training"] | {"batch_size": 32}}
    assert (await user.post("/jobs:validate?wait=0", json=larger)).json()["plan_status"] == (
        "pending"
    )
    assert (await take(worker))["spec"]["training"]["batch_size"] == 32  # type: ignore[index]
    resolved = again["spec"]
    assert plan_key("ada", resolved) != plan_key("bob", resolved)


@pytest.mark.parametrize("found", [{"result": PLAN | {"layer\x00": "\x00"}}, {"problem": "\x00"}])
async def test_what_a_node_writes_is_cleaned(
    worker: Any, user: Any, spec: Any, found: dict[str, Any]
) -> None:
    """Names in a plan are those of somebody's model: whatever they hold, there is a plan."""
    await user.post("/jobs:validate?wait=0", json=spec)
    question = await take(worker)
    assert question is not None
    assert await tell(worker, question["key"], **found)
    report = (await user.post("/jobs:validate?wait=0", json=spec)).json()
    told = report["plan"]["layer\ufffd"] if "result" in found else report["plan_detail"]
    assert told == "\ufffd"


async def test_an_invalid_spec_is_told_as_post_would(worker: Any, user: Any, spec: Any) -> None:
    wrong = spec | {"recipe": {"engine": "emulated", "amax_hist_len": 3}, "training": {"steps": 0}}
    report = await user.post("/jobs:validate", json=wrong)
    assert report.status_code == 200
    refused = await user.post("/jobs", json=wrong)
    assert report.json()["valid"] is False
    told = [{k: v for k, v in e.items() if v is not None} for e in report.json()["errors"]]
    assert told == refused.json()["errors"]
    assert report.json()["spec"] is None
    assert await take(worker) is None
    broken = await user.post("/jobs:validate", content=b"[")
    assert (broken.status_code, broken.json()["type"]) == (422, "/problems/spec-invalid")


async def test_a_failed_plan_says_why_and_is_tried_again(
    worker: Any, user: Any, spec: Any, lone_service: Any
) -> None:
    asking = asyncio.create_task(user.post("/jobs:validate?wait=30", json=spec))
    question = await take(worker, wait=20)
    assert question is not None
    await tell(worker, question["key"], problem="no such model")
    report = (await asking).json()
    assert (report["plan_status"], report["plan_detail"]) == ("failed", "no such model")
    assert report["valid"] is True, "the plan is not the spec"
    await lone_service.sql(
        "UPDATE plan_requests SET answered_at = answered_at - interval '1 minute'"
    )
    assert (await user.post("/jobs:validate?wait=0", json=spec)).json()["plan_status"] == "pending"
    assert await take(worker) is not None


async def test_a_question_goes_to_one_node_and_on_when_it_is_lost(
    worker: Any, user: Any, spec: Any, lone_service: Any
) -> None:
    await user.post("/jobs:validate?wait=0", json=spec)
    first = await take(worker)
    assert first is not None
    slow = worker.node_id
    await worker.register("node-b")
    assert await take(worker) is None, "the other node is at it"
    await lone_service.sql("UPDATE plan_requests SET taken_at = taken_at - interval '10 minutes'")
    assert (await take(worker))["key"] == first["key"]  # type: ignore[index]
    await worker.speak_for("node-a")
    late = await worker.http.post(f"/nodes/{slow}/plans/{first['key']}", json={"result": PLAN})
    assert late.json()["stored"] is False
    await worker.speak_for("node-b")
    assert await tell(worker, first["key"], result=PLAN)
    assert not await tell(worker, first["key"], result=PLAN | {"tokens_per_step": 1})
    foreign = await worker.http.post(f"/nodes/{slow}/plans:take?wait=0", json={})
    assert foreign.status_code == 404, "a key asks for its own node"


async def test_no_node_to_ask(lone_service: Any, spec: Any) -> None:
    user = await lone_service.user()
    report = (await user.post("/jobs:validate", json=spec)).json()
    assert report["valid"] is True
    assert report["plan_status"] == "unavailable"
    assert "No live node" in report["plan_detail"]


async def test_what_no_node_can_run_is_an_error_with_each_nodes_reason(
    worker: Any, user: Any, spec: Any
) -> None:
    report = (
        await user.post("/jobs:validate?wait=0", json=spec | {"resources": {"device": "cuda"}})
    ).json()
    assert report["valid"] is False
    assert [error["code"] for error in report["errors"]] == ["no_capable_node"]
    assert report["nodes"][0]["fits"] is False
    assert "no cuda device" in report["nodes"][0]["reason"]


@pytest.mark.parametrize(
    ("changes", "plan", "code"),
    [
        ({"checkpoint": {"every_steps": 0}}, PLAN, "no_checkpoint"),
        ({"evaluation": {"fraction": 0.0}}, PLAN, "no_evaluation"),
        (
            {
                "training": {
                    "steps": 5,
                    "sequence_length": 64,
                    "schedule": {"name": "linear", "warmup_steps": 5},
                }
            },
            PLAN,
            "all_warm_up",
        ),
        (
            {},
            PLAN | {"conversion": {"converted": 0, "kept_because": {"dimension 10": 2}}},
            "nothing_converts",
        ),
        ({}, PLAN | {"flops": {"fp8_share": 0.2}}, "little_fp8"),
    ],
)
async def test_what_was_probably_not_meant_is_a_warning(
    worker: Any, user: Any, spec: Any, changes: Any, plan: Any, code: str
) -> None:
    asking = asyncio.create_task(user.post("/jobs:validate?wait=30", json=spec | changes))
    question = await take(worker, wait=20)
    assert question is not None
    await tell(worker, question["key"], result=plan)
    codes = [warning["code"] for warning in (await asking).json()["warnings"]]
    assert code in codes
    plain = PLAN if plan is PLAN else plan
    assert codes.count(code) == 1, plain


def test_blocks_that_would_not_be_fused_are_told_with_the_reason() -> None:
    spec = {"recipe": {"engine": "te"}, "conversion": {"fuse": "auto"}}
    fusion = {"blocks": 4, "fused": 3, "not_because": {"self_attn.k_proj is kept: skipped": 1}}
    [warning] = of_plan(spec, PLAN | {"fusion": fusion}, [])
    assert warning.code == "not_fused"
    assert warning.message == ("3 of 4 blocks would be fused: self_attn.k_proj is kept: skipped")
    assert not list(of_plan(spec, PLAN | {"fusion": fusion | {"fused": 4}}, []))
    unasked = spec | {"conversion": {"fuse": "none"}}
    assert not list(of_plan(unasked, PLAN | {"fusion": fusion}, []))


def test_what_was_measured_of_such_sizes_is_told() -> None:
    spec = {"recipe": {"engine": "te"}, "conversion": {"fuse": "none"}}
    small = {"applied": True, "kept": 4, "judged": 14, "says": "4 of 14 are faster in bf16"}
    slow = {"speed_up": 0.9, "says": "measured: 0.90 times as fast"}
    fast = {"speed_up": 1.4, "says": "measured: 1.40 times as fast"}
    found = list(of_plan(spec, PLAN | {"small_gemm": small, "measured": [fast, slow]}, []))
    assert [(warning.code, warning.message) for warning in found] == [
        ("small_gemm", "4 of 14 are faster in bf16"),
        ("slower_in_fp8", "measured: 0.90 times as fast"),
    ]
    assert not list(of_plan(spec, PLAN | {"small_gemm": small | {"kept": 0}, "measured": []}, []))
    # Where everything stays in bf16 it is not slower than that.
    kept = PLAN | {"conversion": {"converted": 0, "kept_because": {"small": 14}}}
    codes = [warning.code for warning in of_plan(spec, kept | {"measured": [slow]}, [])]
    assert codes == ["nothing_converts"]


async def test_memory_is_held_against_the_gpus_that_fit(worker: Any, user: Any, spec: Any) -> None:
    gpu = {"index": 0, "name": "H200", "memory_bytes": 2**31, "compute_capability": "9.0"}
    await worker.register("gpu-node", device_kinds=["cuda"], cpu_slots=0, gpus=[gpu])
    asking = asyncio.create_task(user.post("/jobs:validate?wait=30", json=spec))
    question = await take(worker, wait=20)
    assert question is not None
    await tell(worker, question["key"], result=PLAN | {"memory": {"total": 3 * 2**30}})
    report = (await asking).json()
    assert report["valid"] is True
    [warning] = [w for w in report["warnings"] if w["code"] == "memory"]
    assert "3.0 GiB" in warning["message"]
    assert "2.0 GiB" in warning["message"]


async def test_time_is_told_by_like_jobs_only(
    worker: Any, user: Any, spec: Any, running_job: str
) -> None:
    assert (await user.post("/jobs:validate?wait=0", json=spec)).json()["time"] is None
    await worker.telemetry(
        3,
        {
            "seq": 3,
            "time": 3.0,
            "type": "metrics",
            "step": 2,
            "values": {"perf/tokens_per_second": 1000.0},
        },
    )
    doubled = spec | {"training": spec["training"] | {"steps": 100}}
    time = (await user.post("/jobs:validate?wait=0", json=doubled)).json()["time"]
    assert time["from_jobs"] == [running_job]
    assert time["tokens_per_second"] == 1000.0
    assert time["seconds"] == pytest.approx(100 * 4 * 64 / 1000)
    other = spec | {"training": spec["training"] | {"sequence_length": 32}}
    assert (await user.post("/jobs:validate?wait=0", json=other)).json()["time"] is None


async def test_old_plans_are_forgotten(
    worker: Any, user: Any, spec: Any, lone_service: Any
) -> None:
    await user.post("/jobs:validate?wait=0", json=spec)
    larger = spec | {"training": spec["training"] | {"batch_size": 32}}
    await user.post("/jobs:validate?wait=0", json=larger)
    await lone_service.sql(
        "UPDATE plan_requests SET asked_at = asked_at - interval '2 days' "
        "WHERE spec->'training'->>'batch_size' = '32'"
    )
    async with lone_service.database.transaction() as session:
        assert await PlanRepository(session).forget_old() == 1
    rows = await lone_service.sql("SELECT count(*) AS n FROM plan_requests")
    assert rows[0].n == 1
