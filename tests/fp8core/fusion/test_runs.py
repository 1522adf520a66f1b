"""Whole training runs over fused blocks: as the plain ones, resumed, falling back, saved."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8core import engines
from fp8core.data.batch import Batch
from fp8core.engines.amp import AmpEngine
from fp8core.engines.protocol import NormDescription
from fp8core.fusion import FusedBlock, sight
from fp8core.fusion.joined import lie_together
from fp8core.fusion.plain import PlainParts
from fp8core.spec import AmpRecipe
from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest
from fp8core.training.tensor_files import read_tensors, write_tensors
from tests.fp8core.conversion.conftest import PlainLinear, PlainNorm
from tests.fp8core.fusion.families import make
from tests.fp8core.training.conftest import job, series, train_here
from tests.fp8core.training.plants import stop_in_step

__all__ = ["job", "series", "train_here"]  # fixtures

# `fp8core.fusion.fuse` is the function of that name.
fuse_module = importlib.import_module("fp8core.fusion.fuse")

FP32 = {"engine": "amp", "dtype": "fp32"}
RUN: dict[str, Any] = {
    "recipe": FP32,
    "model": {"source": "config", "config": {"attention_dropout": 0.0}},
    "training": {"steps": 6, "gradient_accumulation": 2},
    "evaluation": {"every_steps": 2, "max_batches": 1},
    "checkpoint": {"every_steps": 2, "keep_best": 0},
}


class FusingAmp(AmpEngine):
    """Autocast that says of every layer that it converts it, and fuses in PyTorch's operations."""

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        return None

    def norm_refusal(self, norm: NormDescription) -> str | None:
        return None

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        return PlainLinear(linear)

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        return PlainNorm(norm)

    fuses_what_it_keeps = False

    def fusion_refusal(self) -> str | None:
        return None

    def block_parts(self) -> PlainParts:
        return PlainParts()


@pytest.fixture(autouse=True)
def fusing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs get the engine above. The names of the blocks that compute fused, as they do."""
    fp32 = AmpRecipe(engine="amp", dtype="fp32")
    monkeypatch.setattr(engines, "create", lambda recipe, device: FusingAmp(fp32, device))
    calls: list[str] = []
    own = FusedBlock.__call__

    def counting(self: FusedBlock, *arguments: Any) -> Tensor:
        calls.append(self.name)
        return own(self, *arguments)

    monkeypatch.setattr(FusedBlock, "__call__", counting)
    return calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fused_run_computes_what_a_plain_one_does(
    checkpointing: bool,
    fusing: list[str],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    """Accumulation, evaluation, clipping, tied embeddings and, in one, recomputation."""
    parts = {**RUN, "training": {**RUN["training"], "gradient_checkpointing": checkpointing}}
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    assert not fusing
    _, fused = train_here(job(**parts))
    assert set(fusing) == {"model.layers.0", "model.layers.1"}
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = series(plain, name)
        assert expected
        assert series(fused, name) == pytest.approx(expected, rel=1e-4), name
    rows = {row["name"]: row for row in json.loads((fused / "conversion.json").read_bytes())}
    assert rows["model.layers.1.mlp.down_proj"]["group"] == "model.layers.1.mlp"


def test_blocks_are_proved_for_rows_as_long_as_the_jobs(
    job: Callable[..., Path], train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer row than those of the proof may be rotated and masked otherwise."""
    asked: list[int] = []
    own = sight.sights

    def watched(model: Any, layers: Sequence[nn.Module], length: int) -> Any:
        asked.append(length)
        return own(model, layers, length)

    monkeypatch.setattr(fuse_module, "sights", watched)
    for length in (24, 96):
        training = {"steps": 1, "sequence_length": length}
        train_here(job(**{**RUN, "training": training}))
    assert asked == [32, 96], "of a multiple of 16"


def test_a_fused_run_resumes_to_the_bit(
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    """Weights come back into joined storages, optimizer states to the Parameters they are of."""
    spec = job(**RUN)
    _, whole = train_here(spec, tmp_path / "whole")
    stop = StopRequest()

    resumed: list[Assembled] = []
    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    assert max(series(parted, "train/loss")) < 6
    train_here(spec, parted, plant=resumed.append)
    assert series(parted, "train/loss") == series(whole, "train/loss")
    attention = resumed[0].learner.model.get_submodule("model.layers.0.self_attn")
    weights = [attention.get_parameter(f"{part}_proj.weight") for part in "qkv"]
    assert lie_together(weights), "loading moved them apart"
    final = [load_file(work / "model" / "model.safetensors") for work in (whole, parted)]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


def test_a_fused_half_falls_back_and_stays_so(
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    """The fault lies in the fused form of one MLP, from step 2 on."""

    def faulty(assembled: Assembled) -> None:
        fusion = assembled.conversion.fusion
        assert fusion is not None
        mlp = next((b.mlp for b in fusion.blocks if b.name == "model.layers.1"), None)
        if mlp is None:
            return
        own, compute = mlp.norm_mlp, assembled.learner.gradients
        steps: list[int] = []

        def gradients(step: int, batches: Sequence[Batch], **options: Any) -> Tensor:
            steps.append(step)
            return compute(step, batches, **options)

        def kernel(x: Tensor) -> Tensor:
            broken = bool(steps) and steps[-1] >= 2
            return own(x) * (math.nan if broken else 1.0)

        mlp.norm_mlp = kernel
        assembled.learner.gradients = gradients  # type: ignore[method-assign]

    training = {**RUN["training"], "on_divergence": "fallback_bf16"}
    # A recipe whose specs may ask for this.
    parts = {**RUN, "recipe": {"engine": "emulated"}, "training": training}
    told: list[Assembled] = []

    def plant(assembled: Assembled) -> None:
        told.append(assembled)
        faulty(assembled)

    _, work = train_here(job(**parts), tmp_path / "work", plant=plant)
    losses = series(work, "train/loss")
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses.values())
    rows = {row["name"]: row for row in json.loads((work / "conversion.json").read_bytes())}
    for layer in ("gate_proj", "up_proj", "down_proj"):
        row = rows[f"model.layers.1.mlp.{layer}"]
        assert (row["to"], row["group"]) == (None, None)
        assert "put back into high precision at step 2" in row["reason"]
    assert rows["model.layers.0.mlp.up_proj"]["group"] == "model.layers.0.mlp"
    fusion = told[0].conversion.fusion
    assert fusion is not None
    assert "model.layers.1.mlp.up_proj" not in fusion.layers


def test_the_reference_of_a_parity_check_is_not_fused(
    job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    training = {**RUN["training"], "parity": {"steps": 2}}
    parts = {**RUN, "recipe": {"engine": "emulated"}, "training": training}
    assembled: list[Assembled] = []
    train_here(job(**parts), plant=assembled.append)
    reference, run = assembled
    assert reference.conversion.fusion is None
    assert run.conversion.fusion is not None


def test_joined_weights_are_saved_each_as_its_own(tmp_path: Path) -> None:
    """Also where files are written straight from the live tensors."""
    from fp8core.fusion import fuse

    model = make("Llama")
    fuse(model, PlainParts(), {})
    live = dict(model.model.layers[0].state_dict())
    assert lie_together([live[f"self_attn.{part}_proj.weight"] for part in "qkv"])
    write_tensors(tmp_path, "model", live)
    found = dict(read_tensors(tmp_path, "model"))
    assert found.keys() == live.keys()
    assert all(torch.equal(found[name], live[name]) for name in live)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(
        tensor.nbytes for tensor in live.values()
    ) + 4096


BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fused_encoder_trains_as_the_plain_one(
    checkpointing: bool,
    packing: bool,
    fusing: list[str],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    """With its dropouts, which draw the same numbers here; packed, and padded rows."""
    parts: dict[str, Any] = {
        **RUN,
        "task": "masked_lm",
        "model": {"source": "config", "config": BERT},
        "data": {"source": "builtin", "packing": packing},
        "training": {**RUN["training"], "gradient_checkpointing": checkpointing},
    }
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    assert not fusing
    _, fused = train_here(job(**parts))
    assert set(fusing) == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = series(plain, name)
        assert expected
        assert series(fused, name) == pytest.approx(expected, rel=1e-4), name
    keys = [load_file(work / "model" / "model.safetensors").keys() for work in (plain, fused)]
    assert keys[0] == keys[1]


def test_an_encoder_with_adapters_beside_its_attention_is_fused(
    fusing: list[str],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    adapter = {"type": "lora", "rank": 4, "target_modules": ["*.query", "*.value"]}
    parts: dict[str, Any] = {
        **RUN,
        "task": "masked_lm",
        "model": {"source": "config", "config": BERT},
        "adapter": adapter,
    }
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    _, fused = train_here(job(**parts))
    assert series(fused, "train/loss") == pytest.approx(series(plain, "train/loss"), rel=1e-4)
    assert any(name.endswith("bert.encoder.layer.1") for name in fusing)
    rows = {row["name"]: row for row in json.loads((fused / "conversion.json").read_bytes())}
    block = "bert.encoder.layer.1"
    assert rows[f"{block}.intermediate.dense"]["group"] == f"{block}.mlp"
    assert rows[f"{block}.intermediate.dense"]["to"] == "NormLinear"  # GELU is the model's
    assert rows[f"{block}.attention.self.key"]["group"] == f"{block}.attention.self"
    assert rows[block]["reason"] is None
