"""Whole runs of adapters beside fused blocks: as beside plain ones, resumed, exported, told of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest
from tests.fp8core.fusion.test_runs import BERT, RUN, fusing
from tests.fp8core.training.conftest import job, series, train_here
from tests.fp8core.training.plants import stop_in_step

__all__ = ["fusing", "job", "series", "train_here"]  # fixtures

LORA = {**RUN, "adapter": {"rank": 4, "dropout": 0.1}}
LORA["training"] = {"steps": 6, "gradient_accumulation": 2, "optimizer": {"lr": 0.02}}


@pytest.mark.parametrize(
    ("targets", "checkpointing"),
    [("linear", False), ("linear", True), (["*.q_proj", "*.v_proj"], False)],
)
def test_a_fused_run_with_adapters_computes_what_a_plain_one_does(
    targets: Any,
    checkpointing: bool,
    fusing: list[str],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
) -> None:
    """Dropout, accumulation, evaluation and, in one, recomputation."""
    training = {**LORA["training"], "gradient_checkpointing": checkpointing}
    adapter = {**LORA["adapter"], "target_modules": targets}
    parts = {**LORA, "training": training, "adapter": adapter}
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    assert not fusing
    _, fused = train_here(job(**parts))
    assert set(fusing) == {"model.layers.0", "model.layers.1"}
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = series(plain, name)
        assert expected
        assert series(fused, name) == pytest.approx(expected, rel=1e-4), name
    assert len(set(series(fused, "eval/loss").values())) == 3, "nothing was trained"
    rows = {row["name"]: row for row in json.loads((fused / "conversion.json").read_bytes())}
    assert rows["model.layers.1"]["to"] == "FusedLlamaDecoderLayer"
    assert rows["model.layers.1"]["reason"] is None
    assert rows["model.layers.1.self_attn.q_proj"]["to"] == "NormLinear"
    down = "Linear" if targets == "linear" else "NormMLP"
    assert rows["model.layers.1.mlp.down_proj"]["to"] == down


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_exports_are_those_of_an_unfused_run(
    form: str, job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    parts = {**LORA, "adapter": {**LORA["adapter"], "export": form}}
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    _, fused = train_here(job(**parts))
    name = "adapter_model" if form == "adapter" else "model"
    expected, found = (load_file(w / f"model/{name}.safetensors") for w in (plain, fused))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        # AdamW divides by roots of squares, which makes much of a rounding of what is nearly 0.
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=key)
    files = {path.name for path in (fused / "model").iterdir()}
    assert files == {path.name for path in (plain / "model").iterdir()}
    if form == "adapter":
        settings = [
            json.loads((w / "model/adapter_config.json").read_bytes()) for w in (plain, fused)
        ]
        assert settings[0] == settings[1]
        assert sum(".lora_B." in key and bool(value.any()) for key, value in found.items()) == 14


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_a_fused_classifier_with_adapters_trains_and_exports_as_a_plain_one(
    form: str,
    fusing: list[str],
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    """Of an encoder, in padded rows; its head and pooler are trained as a whole."""
    lines = [{"text": f"text {i} " * (1 + i % 3), "label": "ab"[i % 2]} for i in range(40)]
    data = tmp_path / "labelled.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts: dict[str, Any] = {
        **LORA,
        "task": "sequence_classification",
        "model": {"source": "config", "config": BERT},
        "data": {"source": "jsonl", "path": str(data), "format": "labelled"},
        "adapter": {"rank": 4, "dropout": 0.1, "export": form},
    }
    _, plain = train_here(job(**parts, conversion={"fuse": "none"}))
    assert not fusing
    _, fused = train_here(job(**parts))
    assert set(fusing) == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    for series_name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected_series = series(plain, series_name)
        assert expected_series
        assert series(fused, series_name) == pytest.approx(expected_series, rel=1e-3), series_name
    name = "adapter_model" if form == "adapter" else "model"
    expected, found = (load_file(w / f"model/{name}.safetensors") for w in (plain, fused))
    assert found.keys() == expected.keys()
    assert any("classifier" in key for key in found)
    for key, value in found.items():
        if "key.bias" not in key:  # its gradient is zero but for rounding
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3, msg=key)


def test_a_fused_run_with_adapters_resumes_to_the_bit(
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    spec = job(**LORA)
    _, whole = train_here(spec, tmp_path / "whole")
    stop = StopRequest()

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    assert max(series(parted, "train/loss")) < 6
    stored = load_file(parted / "checkpoints/step-00000003/adapter.safetensors")
    assert len(stored) == 2 * 7 * 2
    train_here(spec, parted)
    assert series(parted, "train/loss") == series(whole, "train/loss")
    final = [load_file(work / "model/model.safetensors") for work in (whole, parted)]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


@pytest.mark.parametrize("backward", [False, True])
def test_a_half_with_adapters_falls_back_and_trains_on(
    backward: bool,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    series: Callable[[Path, str], dict[int, float]],
    tmp_path: Path,
) -> None:
    """What is put back computes through ``peft``'s own layers."""

    def faulty(assembled: Assembled) -> None:
        fusion = assembled.conversion.fusion
        assert fusion is not None
        mlp = next((b.mlp for b in fusion.blocks if b.name == "model.layers.1"), None)
        if mlp is None:
            return
        own, compute = mlp.norm_mlp, assembled.learner.gradients
        steps: list[int] = []

        def gradients(step: int, *arguments: Any, **options: Any) -> Tensor:
            steps.append(step)
            return compute(step, *arguments, **options)

        def kernel(x: Tensor) -> Tensor:
            output: Tensor = own(x)
            broken = bool(steps) and steps[-1] >= 2
            if broken and backward and output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.nan)
            return output * (math.nan if broken and not backward else 1.0)

        mlp.norm_mlp = kernel
        assembled.learner.gradients = gradients  # type: ignore[method-assign]

    training = {**LORA["training"], "on_divergence": "fallback_bf16"}
    # A recipe whose specs may ask for this.
    parts = {**LORA, "recipe": {"engine": "emulated"}, "training": training}
    _, work = train_here(job(**parts), tmp_path / "work", plant=faulty)
    _, whole = train_here(job(**LORA), tmp_path / "whole")
    losses = series(work, "train/loss")
    assert losses == pytest.approx(series(whole, "train/loss"), rel=1e-4)
    rows = {row["name"]: row for row in json.loads((work / "conversion.json").read_bytes())}
    reasons = {
        layer: str(rows[f"model.layers.1.mlp.{layer}_proj"]["reason"])
        for layer in ("gate", "up", "down")
    }
    assert "put back into high precision at step 2" in reasons["down"]
    assert all("put back" in reason for reason in reasons.values()), reasons
    assert rows["model.layers.0.mlp.up_proj"]["group"] == "model.layers.0.mlp"
    # The output of the half is seen in the block's alone, its gradient by its own adapters.
    attention = rows["model.layers.1.self_attn.q_proj"]["group"]
    assert attention == ("model.layers.1.self_attn" if backward else None)


def test_the_precision_table_tells_adapters_from_what_they_stand_beside(
    job: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    _, work = train_here(job(**LORA))
    table = json.loads((work / "precision.json").read_bytes())["rows"]
    seen = {
        " ".join(gemm["gemm"] for gemm in kind["gemms"]): kind["layers"]
        for kind in table["gemm_compute"]["layers"]
        if kind["adapter"]
    }
    # The first three matrices A have frozen weights behind them alone.
    assert seen == {"fprop wgrad": 3, "fprop dgrad wgrad": 25}
