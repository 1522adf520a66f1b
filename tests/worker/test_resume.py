"""From which checkpoint an attempt goes on, and what it does when there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_torn_checkpoints_are_passed_over(workplace: Any) -> None:
    """The newest lost a byte, the next has other bytes, the next lost a file."""
    first = workplace.api.add("att_a", {"steps": 8, "checkpoint_every": 2})
    first.spec["checkpoint"] = {"keep_last": 9}
    assert workplace.supervise("att_a").wait(timeout=30) == 0
    names = [f"step-{step:08d}" for step in (8, 6, 4, 2)]
    places = [Path(first.candidate(name)["url"].removeprefix("file://")) for name in names]
    states = [place / "state.json" for place in places]
    states[0].write_bytes(states[0].read_bytes()[:-1])
    states[1].write_bytes(states[1].read_bytes()[:-1] + b"x")
    states[2].unlink()
    second = workplace.api.add("att_b", {"steps": 5})
    second.resume_candidates = [first.candidate(name) for name in names]
    assert workplace.supervise("att_b").wait(timeout=30) == 0, workplace.log()
    assert second.steps == [3, 4, 5]
    assert second.events == ["checkpoint_torn"] * 3 + ["checkpoint_fetched"]
    assert second.data_of("checkpoint_torn") == [
        {"artifact_id": f"art_checkpoint_{name}", "step": step}
        for name, step in zip(names, (8, 6, 4), strict=False)
    ]


def test_without_a_whole_one_it_begins_anew_and_says_so(workplace: Any) -> None:
    first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
    assert workplace.supervise("att_a").wait(timeout=30) == 0
    point = first.candidate("step-00000002")
    (Path(point["url"].removeprefix("file://")) / "manifest.json").unlink()
    second = workplace.api.add("att_b", {"steps": 2}, resume_candidates=[point])
    assert workplace.supervise("att_b").wait(timeout=30) == 0, workplace.log()
    assert second.steps == [1, 2]
    assert second.events == ["checkpoint_torn", "no_checkpoint"]


def test_a_store_that_is_not_mounted_tears_nothing(
    workplace: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
    assert workplace.supervise("att_a").wait(timeout=30) == 0
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.rename(elsewhere)
    store.mkdir()  # the empty mount point
    point = first.candidate("step-00000002")
    second = workplace.api.add("att_b", {"steps": 4}, resume_candidates=[point])
    child = workplace.supervise("att_b")
    until(lambda: second.events, "the first try")
    assert second.events == ["store_unreachable"]
    store.rmdir()
    elsewhere.rename(store)
    assert child.wait(timeout=30) == 0, workplace.log()
    assert second.steps == [3, 4]
    assert second.events == ["store_unreachable", "checkpoint_fetched"]

    store.rename(elsewhere)
    workplace.environment["OCTRAIN_SUPERVISOR_FETCH_PATIENCE_SECONDS"] = "0.2"
    third = workplace.api.add("att_c", {"steps": 4}, resume_candidates=[point])
    assert workplace.supervise("att_c").wait(timeout=30) == 0
    assert third.finished["reason"] == "internal_error"
    assert third.finished["resumable"] is True
    assert "could not be read" in third.finished["detail"]
    assert third.steps == []


def test_too_little_room_is_told_before_anything_begins(workplace: Any) -> None:
    first = workplace.api.add("att_a", {"steps": 2, "checkpoint_every": 2})
    assert workplace.supervise("att_a").wait(timeout=30) == 0
    point = first.candidate("step-00000002")
    huge = {"path": "model.safetensors", "size": 1 << 60, "sha256": "0" * 64}
    point["manifest"] = {"complete": True, "files": [huge]}
    second = workplace.api.add("att_b", {"steps": 4}, resume_candidates=[point])
    second.spec["checkpoint"] = {"keep_last": 2, "every_steps": 1}
    assert workplace.supervise("att_b").wait(timeout=30) == 0
    assert second.finished["reason"] == "storage_full"
    assert second.finished["resumable"] is False
    assert f"{1 << 30}.00 GiB at once" in second.finished["detail"]
    assert str(workplace.folder("att_b").work) in second.finished["detail"]
    assert second.events == []
