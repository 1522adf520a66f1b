"""Jobs on a GPU whose fused blocks go back to high precision, one half and then all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.test_te_jobs_gpu import FUSED, ON_GPU, Job, Series, TrainHere, events

pytestmark = pytest.mark.gpu

RECIPES: dict[str, dict[str, Any]] = {
    "all GEMMs in FP8": ON_GPU["recipe"],
    "wgrad in bf16": {**ON_GPU["recipe"], "override_linear_precision": [False, False, True]},
    "dgrad and wgrad in bf16": {
        "engine": "te",
        "scaling": "block",
        "backward_override": "dequantized",
    },
}


def break_mlps(
    assembled: Assembled, blocks: Collection[str], stop: StopRequest, until: int | None
) -> None:
    """From step 3 on the fused forms of these MLPs give no numbers. The run stops at ``until``."""
    fusion = assembled.conversion.fusion
    compute, now = assembled.learner.gradients, 0
    for block in fusion.blocks if fusion is not None else ():
        if block.name in blocks and block.mlp is not None:
            block.mlp.norm_mlp = broken(block.mlp.norm_mlp, lambda: now >= 3)

    def gradients(step: int, *arguments: Any, **options: Any) -> Tensor:
        nonlocal now
        now = step
        stop.requested = until is not None and step >= until
        return compute(step, *arguments, **options)

    assembled.learner.gradients = gradients  # type: ignore[method-assign]


def broken(kernel: Any, now: Any) -> Any:
    return lambda x: kernel(x) * (math.nan if now() else 1.0)


def assert_all_fell_back(workdir: Path, losses: dict[int, float]) -> None:
    """First one block; the same step failed once more, in the other, and all else followed."""
    first, second = (event["data"] for event in events(workdir, "fallback_bf16"))
    assert {".".join(name.split(".")[:3]) for name in first["layers"]} == {"model.layers.0"}
    assert (first["step"], second["step"], second["remaining"]) == (3, 3, 0)
    assert len(losses) == 6
    assert all(math.isfinite(value) for value in losses.values())
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    assert not [name for name, row in rows.items() if row["group"] is not None]
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        for block in ("model.layers.0", "model.layers.1"):
            assert rows[f"{block}.{layer}"]["to"] is None, (block, layer)


def spec_of(job: Job, recipe: str) -> Path:
    parts = {
        **ON_GPU,
        "recipe": RECIPES[recipe],
        "conversion": {"fuse": "auto", "small_gemm": "off"},
        "model": FUSED,
    }
    return job(**parts, training={"on_divergence": "fallback_bf16"})


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_fused_block_falls_back_and_stays_so_after_a_resume(
    recipe: str, job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    """What a fused block computes is seen as a whole, so that all its layers go back; those of the
    other block stay."""
    stop, faulty, workdir = StopRequest(), {"model.layers.1"}, tmp_path / "w"
    spec = spec_of(job, recipe)
    train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, 4), stop=stop)
    stop.requested = False
    result, _ = train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, None))
    assert result.step == 6
    (event,) = events(workdir, "fallback_bf16")
    assert event["data"]["step"] == 3
    assert {".".join(name.split(".")[:3]) for name in event["data"]["layers"]} == faulty
    assert all(math.isfinite(value) for value in series(workdir, "train/loss").values())
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    for layer in ("gate_proj", "up_proj", "down_proj"):
        assert "put back into high precision" in rows[f"model.layers.1.mlp.{layer}"]["reason"]
        assert rows[f"model.layers.0.mlp.{layer}"]["group"] == "model.layers.0.mlp"


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_all_fall_back_where_one_block_was_not_enough(
    recipe: str, job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    """The first block goes back; the same step fails once more, in the second, and all go."""
    stop, workdir = StopRequest(), tmp_path / "w"
    faulty = {"model.layers.0", "model.layers.1"}
    spec = spec_of(job, recipe)
    train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, 4), stop=stop)
    stop.requested = False
    result, _ = train_here(spec, workdir, plant=lambda a: break_mlps(a, faulty, stop, None))
    assert result.step == 6
    assert_all_fell_back(workdir, series(workdir, "train/loss"))
