"""A node whose disk is too small, or fills up, with the product's own trainer on a real small disk.

A tmpfs is that disk; where none may be mounted there is nothing to test with.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small_disk import NoSmallDisk
from tests.small_disk import small_disk as small_disk_on

pytestmark = pytest.mark.slow

MIB = 1 << 20


def spec(**checkpoint: int) -> dict[str, Any]:
    """A model whose checkpoint, with both moments of its weights, takes between 4 and 6 MiB."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 384,
        "max_position_embeddings": 64,
    }
    return {
        "model": {"source": "config", "config": config},
        "data": {"source": "builtin", "name": "python_topics"},
        "recipe": {"engine": "emulated", "amax_history_len": 4, "amax_compute_algo": "max"},
        "training": {"steps": 20_000, "batch_size": 2, "sequence_length": 32},
        "checkpoint": {"keep_best": 0, **checkpoint},
        "evaluation": {"every_steps": 0, "max_batches": 1},
    }


def fill(path: Path) -> None:
    """Takes all that is left on the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * MIB)


def stored(attempt: Any) -> list[dict[str, Any]]:
    return [one for (kind, _), one in list(attempt.artifacts.items()) if kind == "checkpoint"]


@pytest.fixture
def small_disk(workplace: Any) -> Iterator[Callable[[int], Path]]:
    """Puts the node's data folder on a disk of so many bytes."""
    workplace.environment["OCTRAIN_TRAINER_COMMAND"] = f"{sys.executable} -m fp8core"
    with contextlib.ExitStack() as mounts:

        def mount(size: int) -> Path:
            try:
                return mounts.enter_context(small_disk_on(workplace.data, size))
            except NoSmallDisk as error:
                pytest.skip(f"no file system may be mounted here: {error}")

        yield mount
        workplace.clean_up()


def test_too_little_room_is_told_before_the_first_step(
    workplace: Any, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(24 * MIB)
    attempt = workplace.api.add("att_a", {})
    attempt.spec = spec(every_steps=2, keep_last=5)
    assert workplace.supervise("att_a").wait(timeout=120) == 0, workplace.log()
    assert attempt.finished["reason"] == "storage_full", attempt.finished
    assert attempt.finished["resumable"] is False
    detail = attempt.finished["detail"]
    assert f"the work folder {disk}" in detail
    assert "MiB free" in detail
    assert "(7 of " in detail
    assert attempt.steps == []
    assert {kind for kind, _ in attempt.artifacts} <= {"log", "conversion", "report"}


def test_a_disk_that_fills_up_costs_no_checkpoint(
    workplace: Any, small_disk: Callable[[int], Path], until: Callable[..., Any]
) -> None:
    disk = small_disk(96 * MIB)
    attempt = workplace.api.add("att_a", {})
    attempt.spec = spec(every_steps=20, keep_last=2)
    child = workplace.supervise("att_a")
    until(lambda: stored(attempt), "the first checkpoint in the store", 120)
    fill(disk / "filler")
    until(lambda: child.poll() is not None, "the attempt's end", 120)
    assert child.returncode == 0, workplace.log()
    assert attempt.finished["outcome"] == "failed"
    assert attempt.finished["reason"] == "storage_full", attempt.finished
    assert "bytes were free" in attempt.finished["detail"]
    checkpoints = stored(attempt)
    newest = max(one["step"] for one in checkpoints)
    assert set(range(1, newest + 1)) <= set(attempt.steps)
    for one in checkpoints:
        folder = Path(one["url"].removeprefix("file://"))
        assert "manifest.json" in {file["path"] for file in one["files"]}
        for file in one["files"]:
            data = (folder / file["path"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file["sha256"], file["path"]
