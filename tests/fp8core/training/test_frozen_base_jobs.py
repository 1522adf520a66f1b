"""LoRA jobs whose frozen base lies in FP8: what is told, resumed, falls back and is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp8core.errors import SpecRefused
from fp8core.numerics.float8_weight import Float8Weight
from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.plants import spoil_in_fp8, stop_in_step
from tests.fp8core.training.stored_bases import (
    CURRENT,
    DELAYED,
    OF_BASE,
    STORED,
    Job,
    Series,
    TrainHere,
    of,
)
from tests.fp8core.training.test_adapter import FAST, QUICK, base

__all__ = ["base"]  # a fixture


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_weights_lie_in_fp8_and_are_told_of(
    job: Job, train_here: TrainHere, series: Series, base: Path, recipe: dict[str, Any]
) -> None:
    held: list[Assembled] = []
    spec = job(**QUICK, model=of(base), recipe=recipe, adapter=STORED, training=FAST)
    _, workdir = train_here(spec, plant=held.append)
    model = held[0].learner.model
    stored = [p for p in model.parameters() if isinstance(p, Float8Weight)]
    assert len(stored) == 14
    assert all(isinstance(p, nn.Parameter) and not p.requires_grad for p in stored)
    rows = json.loads((workdir / "conversion.json").read_bytes())
    (row,) = [row for row in rows if row["name"] == "frozen weights"]
    assert (row["from"], row["to"], row["reason"]) == ("fp32", "fp8_e4m3", None)
    report = json.loads((workdir / "report.json").read_bytes())
    assert report["conversion"]["base_weights"] == {
        "gemms": 14,
        "weights": OF_BASE,
        "kept": 0,
        "kept_because": {},
    }
    table = json.loads((workdir / "precision.json").read_bytes())["rows"]["weights"]
    assert table["formats"]["fp8_e4m3"] == {"bytes": OF_BASE, "elements": OF_BASE}
    original = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj"
    amax = float(original[f"{name}.weight"].abs().max())
    for step in (2, 4):
        assert series(workdir, f"fp8/{name}/weight/amax")[step] == amax
        assert series(workdir, f"fp8/{name}/weight/scale")[step] == pytest.approx(448 / amax)
        assert series(workdir, f"fp8/{name}/weight/saturated")[step] == 0
    assert series(workdir, f"fp8/{name}/input/amax")[2] > 0


def test_a_run_resumes_exactly_and_its_checkpoints_hold_adapters_alone(
    job: Job, train_here: TrainHere, series: Series, base: Path, tmp_path: Path
) -> None:
    adapter = {**STORED, "dropout": 0.2}
    training = {**FAST, "steps": 6, "gradient_checkpointing": True}
    evaluation = {"every_steps": 2, "max_batches": 1}
    parts = {**QUICK, "evaluation": evaluation}
    spec = job(**parts, model=of(base), recipe=DELAYED, adapter=adapter, training=training)
    _, whole = train_here(spec)
    stop = StopRequest()

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    stored = load_file(parted / "checkpoints/step-00000003/adapter.safetensors")
    assert all(".lora_" in name for name in stored)
    train_here(spec, parted)
    for name in ("train/loss", "eval/loss"):
        assert series(parted, name) == series(whole, name)
    final = [load_file(w / "model/model.safetensors") for w in (whole, parted)]
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


def test_layers_fall_back_to_high_precision_with_parity_beside(
    job: Job, train_here: TrainHere, base: Path, series: Series
) -> None:
    held: list[Assembled] = []

    def faulty(assembled: Assembled) -> None:
        held.append(assembled)
        spoil_in_fp8(assembled, "model.layers.0.mlp.down_proj.base_layer")

    training = {
        **FAST,
        "on_divergence": "fallback_bf16",
        "parity": {"steps": 3, "bound": 1.0},
    }
    spec = job(**QUICK, model=of(base), recipe=DELAYED, adapter=STORED, training=training)
    _, workdir = train_here(spec, plant=faulty)
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    assert rows["model.layers.0.mlp.down_proj"]["to"] is None
    assert json.loads((workdir / "report.json").read_bytes())["parity"]["verdict"] == "within"
    reference, own = held
    assert reference.conversion.base_weights is None
    layer = own.learner.model.get_submodule("model.layers.0.mlp.down_proj.base_layer")
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, Float8Weight)


def test_a_model_that_has_none_to_store_is_refused_by_the_node(
    job: Job, train_here: TrainHere, base: Path
) -> None:
    spec = job(
        **QUICK,
        model=of(base),
        adapter=STORED,
        conversion={"skip": ["*_proj"]},
        training=FAST,
    )
    with pytest.raises(SpecRefused, match="no frozen weight of this model") as caught:
        train_here(spec)
    assert caught.value.pointer == "/adapter/base_weights"
