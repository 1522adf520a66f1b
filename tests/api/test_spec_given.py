"""What was written of a spec is kept apart from what was filled in."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fp8core.spec import parse_spec
from octrain_api.jobs.given import as_given, given_with
from octrain_api.jobs.overrides import overridden

_SCHEDULE = {"schedule": {"warmup_steps": 1}, "sequence_length": 64}


def _contained(part: Any, whole: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and _contained(part[name], whole[name]) for name in part)
    return bool(part == whole)


async def test_a_job_tells_what_was_written_of_its_spec(user: Any, spec: Any) -> None:
    # The same as its default, which nothing else could tell.
    spec["training"]["gradient_accumulation"] = 1
    made = (await user.post("/jobs", json=spec)).json()
    read = (await user.get(f"/jobs/{made['id']}")).json()
    assert made["spec_given"] == read["spec_given"] == spec
    assert read["spec"]["priority"] == 0
    assert "priority" not in read["spec_given"]
    assert _contained(read["spec_given"], read["spec"])
    # Lists are long: it is told of one job alone.
    [listed] = [j for j in (await user.get("/jobs")).json()["items"] if j["id"] == made["id"]]
    assert "spec_given" not in listed
    assert (await user.get("/jobs?fields=spec_given")).status_code == 422


async def test_changes_and_clones_are_written_over_it(user: Any, spec: Any) -> None:
    job_id = (await user.post("/jobs?draft=true", json=spec)).json()["id"]
    body = {"spec": {"training": {"steps": 7}, "resources": {"device": "cpu"}}, "notes": "n"}
    changed = (await user.patch(f"/jobs/{job_id}", json=body)).json()
    written = copy.deepcopy(spec)
    written["training"]["steps"] = 7
    written |= {"resources": {"device": "cpu"}, "notes": "n"}
    assert changed["spec_given"] == written
    started = (await user.post(f"/jobs/{job_id}/start")).json()
    assert started["spec_given"] == written
    body = {"recipe": {"engine": "amp", "dtype": "bf16"}, "training": {"steps": None}}
    clone = (await user.post(f"/jobs/{job_id}/clone", json=body)).json()
    del written["training"]["steps"]
    written["recipe"] = {"engine": "amp", "dtype": "bf16"}
    assert clone["spec_given"] == written
    named = (await user.patch(f"/jobs/{clone['id']}", json={"labels": {"a": "b"}})).json()
    assert named["spec_given"] == {**written, "labels": spec.get("labels", {}) | {"a": "b"}}


async def test_of_jobs_from_before_nobody_knows(lone_service: Any, user: Any, spec: Any) -> None:
    job_id = (await user.post("/jobs?draft=true", json=spec)).json()["id"]
    await lone_service.sql("UPDATE jobs SET spec_given = NULL")
    changed = await user.patch(f"/jobs/{job_id}", json={"spec": {"training": {"steps": 7}}})
    assert changed.json()["spec"]["training"]["steps"] == 7
    clone = await user.post(f"/jobs/{job_id}/clone", json={"name": "again"})
    assert (changed.json()["spec_given"], clone.json()["spec_given"]) == (None, None)


async def test_a_deleted_job_keeps_nothing_of_it(lone_service: Any, user: Any, spec: Any) -> None:
    job_id = (await user.post("/jobs?draft=true", json=spec)).json()["id"]
    assert (await user.delete(f"/jobs/{job_id}")).status_code == 204
    assert await lone_service.sql("SELECT spec_given FROM jobs") == [(None,)]


async def test_a_named_recipe_stays_a_name(user: Any, spec: Any) -> None:
    fragment = {"recipe": {"engine": "emulated", "scaling": "delayed", "amax_history_len": 8}}
    await user.post("/recipes", json={"name": "std", "fragment": fragment})
    spec["recipe"] = {"name": "std", "margin": 2}
    job = (await user.post("/jobs", json=spec)).json()
    assert job["spec"]["recipe"]["amax_history_len"] == 8
    assert job["spec_given"]["recipe"] == {"name": "std", "margin": 2}
    body = {"recipe": {"margin": 3}}
    clone = (await user.post(f"/jobs/{job['id']}/clone", json=body)).json()
    assert clone["spec_given"]["recipe"] == {"name": "std", "margin": 3}


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ({"recipe": {"fp8_format": "hybrid"}}, {"recipe": {"fp8_format": "HYBRID"}}),
        (
            {"recipe": {"fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": False}}},
            {"recipe": {"engine": "torchao"}},
        ),
        (
            {"recipe": {"engine": "te", "use_mxfp8_block_scaling": True}},
            {"recipe": {"engine": "te", "scaling": "mxfp8"}},
        ),
        ({"tokenizer": "bytes"}, {"tokenizer": {"source": "bytes"}}),
        (
            {"training": {"precision": "throughput", **_SCHEDULE}},
            {"training": {"precision": {"preset": "throughput"}, **_SCHEDULE}},
        ),
    ],
)
def test_it_is_spelled_as_the_spec_is(spec: Any, written: Any, kept: Any) -> None:
    body = {**spec, "recipe": {"engine": "emulated"}, **written}
    before = copy.deepcopy(body)
    given = as_given(body)
    assert body == before
    assert given == {**body, **kept}
    assert _contained(given, parse_spec(body).resolved())


def test_parts_of_another_kind_begin_anew_by_the_whole_spec() -> None:
    whole = {
        "recipe": {"engine": "te", "scaling": "delayed", "margin": 0},
        "training": {"steps": 1},
    }
    given = {"recipe": {"margin": 0}}
    # The engine was a default, and is the same: what else was written stays.
    kept = given_with(given, whole, {"recipe": {"engine": "te"}})
    assert kept == {"recipe": {"engine": "te", "margin": 0}}
    other = {"recipe": {"engine": "amp"}, "training": {"optimizer": {"name": "sgd"}}}
    assert given_with(given, whole, other) == other
    assert overridden(whole, other)["training"] == {"steps": 1, "optimizer": {"name": "sgd"}}
    assert given_with(None, whole, other) is None
