"""Whole jobs over a frozen base in FP8 in Transformer Engine's kernels, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8core.numerics.float8_weight import Float8Weight
from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.conftest import job, series, train_here
from tests.fp8core.training.plants import stop_in_step

__all__ = ["job", "series", "train_here"]  # fixtures

pytest.importorskip("peft")
from tests.fp8core.training.stored_bases_gpu import RECIPES, SCALINGS  # it imports peft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("recipe", SCALINGS)
def test_a_job_evaluates_resumes_exports_and_says_what_its_base_lies_in(
    recipe: str,
    fuse: str,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    parts: dict[str, Any] = {
        "model": {"config": {"attention_dropout": 0.0, "hidden_size": 64, "head_dim": 32}},
        "recipe": RECIPES[recipe],
        "training": {"steps": 6, "optimizer": {"lr": 0.01}, "gradient_accumulation": 2},
        "resources": {"device": "cuda"},
        "evaluation": {"every_steps": 2, "max_batches": 1},
        "checkpoint": {"every_steps": 0, "keep_best": 0},
        "telemetry": {"fp8_every_steps": 2},
        "conversion": {"fuse": fuse, "small_gemm": "off"},
    }
    lora = {"rank": 8, "dropout": 0.1}
    _, plain = train_here(job(**parts, adapter=lora))
    spec = job(**parts, adapter={**lora, "base_weights": "fp8"})
    _, whole = train_here(spec)
    stop = StopRequest()

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    train_here(spec, parted)
    for name in ("train/loss", "eval/loss"):
        assert series(parted, name) == pytest.approx(series(whole, name), rel=1e-3), name
        assert series(whole, name) == pytest.approx(series(plain, name), rel=0.05), name
    table = json.loads((whole / "precision.json").read_bytes())["rows"]
    report = json.loads((whole / "report.json").read_bytes())
    stored = report["conversion"]["base_weights"]
    assert stored["gemms"] == (8 if fuse == "auto" else 14)
    assert table["weights"]["formats"]["fp8_e4m3"] == {
        "bytes": stored["weights"],
        "elements": stored["weights"],
    }
    base = [k for k in table["gemm_compute"]["layers"] if k["converted"] and not k["adapter"]]
    formats = {gemm["operands"]["weight"]["format"] for kind in base for gemm in kind["gemms"]}
    assert formats == {"fp8_e4m3"}
    one, other = (load_file(w / "model/model.safetensors") for w in (plain, whole))
    assert one.keys() == other.keys()
    apart = {
        key: float((other[key].float() - one[key].float()).norm() / one[key].float().norm())
        for key in one
    }
    assert max(apart.values()) < 0.25, apart
    # The base itself came from where it was loaded, and was not rounded.
    assert other["model.embed_tokens.weight"].equal(one["model.embed_tokens.weight"])
    assert other["model.layers.0.mlp.up_proj.weight"].unique().numel() > 1500


def test_layers_that_fall_back_compute_with_the_stored_values(
    job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    held: list[Assembled] = []

    def faulty(assembled: Assembled) -> None:
        held.append(assembled)
        layer = assembled.learner.model.get_submodule("model.layers.0.mlp.down_proj.base_layer")

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            bad = type(module) is not nn.Linear and module.training
            return output * float("inf") if bad else None

        layer.register_forward_hook(hook)

    spec = job(
        model={"config": {"attention_dropout": 0.0}},
        recipe=RECIPES["delayed"],
        training={"steps": 3, "on_divergence": "fallback_bf16"},
        adapter={"rank": 4, "base_weights": "fp8"},
        resources={"device": "cuda"},
        evaluation={"every_steps": 0, "max_batches": 1},
        checkpoint={"every_steps": 0, "keep_best": 0},
        conversion={"fuse": "none", "small_gemm": "off"},
    )
    result, _ = train_here(spec, plant=faulty)
    assert result.step == 3
    layer = held[0].learner.model.get_submodule("model.layers.0.mlp.down_proj.base_layer")
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, Float8Weight)
