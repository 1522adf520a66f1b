"""On a GPU with Transformer Engine: what a CPU shows with the emulated engine holds there too."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from fp8core.errors import Diverged
from fp8core.telemetry import read_records
from fp8core.training.assemble import Assembled
from fp8core.training.outcome import RunResult
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.plants import stop_in_step

pytestmark = pytest.mark.gpu

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
FAULTY = "model.layers.1.mlp.gate_proj"
# Not the layer's own output, which a cast to FP8 would saturate: that of the kept output head.
HEAD = "lm_head"
ON_GPU: dict[str, Any] = {
    "model": {"config": {"attention_dropout": 0.0}},
    "recipe": {"engine": "te", "amax_history_len": 4},
    # Faults are planted in single layers, which are too small to be faster in FP8.
    "conversion": {"fuse": "none", "small_gemm": "off"},
    "resources": {"device": "cuda"},
    "evaluation": {"every_steps": 0, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 0},
}
# Wide enough for the kernels of fused blocks.
FUSED = {
    "config": {
        "attention_dropout": 0.0,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
}
E4M3, E5M2, BF16 = "fp8_e4m3", "fp8_e5m2", "bf16"


def plant(
    name: str, steps: set[int], applies: Callable[[nn.Module], bool] = lambda module: True
) -> Callable[[Assembled], dict[int, dict[str, Tensor]]]:
    """An infinity in what ``name`` gives in some steps; returns the states before each step."""

    def into(assembled: Assembled) -> dict[int, dict[str, Tensor]]:
        learner, compute = assembled.learner, assembled.learner.gradients
        before: dict[int, dict[str, Tensor]] = {}
        now = 0

        def counted(step: int, *arguments: Any, **options: Any) -> Tensor:
            nonlocal now
            now = step
            if step not in before:
                state = dict(learner.model.state_dict()) | dict(learner.engine.state_dict())
                state |= learner.optimizer.state_tensors()
                before[step] = {key: value.clone() for key, value in state.items()}
            return compute(step, *arguments, **options)

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if now not in steps or not module.training or not applies(module):
                return None
            return output.index_fill(-1, torch.tensor([0], device=output.device), math.inf)

        learner.gradients = counted  # type: ignore[method-assign]
        learner.model.get_submodule(name).register_forward_hook(hook)
        return before

    return into


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    records = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    return [r for r in records if r["type"] == "event" and r["kind"] == kind]


def gemms(entry: dict[str, Any]) -> dict[str, list[str]]:
    return {
        row["gemm"]: [operand["format"] for operand in row["operands"].values()]
        for row in entry["gemms"]
    }


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (
            {"engine": "te"},
            {"fprop": [E4M3, E4M3], "dgrad": [E5M2, E4M3], "wgrad": [E5M2, E4M3]},
        ),
        (
            {"engine": "te", "scaling": "current"},
            {"fprop": [E4M3, E4M3], "dgrad": [E5M2, E4M3], "wgrad": [E5M2, E4M3]},
        ),
        (
            {"engine": "te", "fp8_format": "E4M3"},
            {"fprop": [E4M3, E4M3], "dgrad": [E4M3, E4M3], "wgrad": [E4M3, E4M3]},
        ),
        (
            {"engine": "te", "scaling": "block"},
            {"fprop": [E4M3, E4M3], "dgrad": [E4M3, E4M3], "wgrad": [E4M3, E4M3]},
        ),
        (
            {"engine": "te", "scaling": "block", "backward_override": "high_precision"},
            {"fprop": [E4M3, E4M3], "dgrad": [BF16, BF16], "wgrad": [BF16, BF16]},
        ),
        (
            {"engine": "te", "override_linear_precision": [False, True, True]},
            {"fprop": [E4M3, E4M3], "dgrad": [BF16, BF16], "wgrad": [BF16, BF16]},
        ),
        (
            {"engine": "torchao"},
            {"fprop": [E4M3, E4M3], "dgrad": [E5M2, E4M3], "wgrad": [E5M2, E4M3]},
        ),
    ],
)
def test_the_precision_table(
    job: Job, train_here: TrainHere, recipe: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    _, workdir = train_here(job(**{**ON_GPU, "recipe": recipe}, training={"steps": 1}))
    assert not events(workdir, "precision_not_measured")
    table = json.loads((workdir / "precision.json").read_bytes())
    kinds = {k["converted"]: k for k in table["rows"]["gemm_compute"]["layers"]}
    assert kinds[True]["layers"] == 14
    assert gemms(kinds[True]) == expected
    assert gemms(kinds[False]) == {name: [BF16, BF16] for name in ("fprop", "dgrad", "wgrad")}


def test_measuring_leaves_scales_and_losses_alone(
    job: Job, train_here: TrainHere, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8core.training.precision_table import PrecisionTable

    _, measured = train_here(job(**ON_GPU))
    monkeypatch.setattr(PrecisionTable, "before_step", lambda self, batches: None)
    _, plain = train_here(job(**ON_GPU))
    for step, loss in series(plain, "train/loss").items():
        assert series(measured, "train/loss")[step] == pytest.approx(loss, rel=1e-3)


def test_fail_finds_the_weights_of_before(job: Job, train_here: TrainHere) -> None:
    held: list[dict[int, dict[str, Tensor]]] = []
    with pytest.raises(Diverged) as caught:
        train_here(job(**ON_GPU), plant=lambda a: held.append(plant(HEAD, {3})(a)))
    states = held[0]
    assert "the loss of step 3" in caught.value.message
    assert f"the output of {HEAD}" in caught.value.message
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(states[2][name], states[3][name])
    # Step 4 was computed before the figures of step 3 had arrived.
    assert torch.equal(states[3][name], states[4][name])


def test_a_skipped_step_changes_nothing(job: Job, train_here: TrainHere) -> None:
    held: list[dict[int, dict[str, Tensor]]] = []
    spec = job(**ON_GPU, training={"on_divergence": "skip_step"})
    result, workdir = train_here(spec, plant=lambda a: held.append(plant(HEAD, {3})(a)))
    assert result.step == 6
    (event,) = events(workdir, "step_skipped")
    assert event["data"]["layer"] == HEAD
    states = held[0]
    assert any("amax_history" in key for key in states[3])
    for key, value in states[3].items():
        assert torch.equal(value, states[4][key]), key
    assert not torch.equal(states[4]["lm_head.weight"], states[5]["lm_head.weight"])


def test_fallback_and_its_resume(
    job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    def fault(assembled: Assembled) -> None:
        plant(FAULTY, {3, 4, 5, 6}, lambda module: type(module) is not nn.Linear)(assembled)

    spec = job(**ON_GPU, training={"on_divergence": "fallback_bf16"})
    stop = StopRequest()

    def stopping(assembled: Assembled) -> None:
        fault(assembled)
        stop_in_step(4, stop)(assembled)

    workdir = tmp_path / "w"
    train_here(spec, workdir, plant=stopping, stop=stop)
    train_here(spec, workdir, plant=fault)
    (event,) = events(workdir, "fallback_bf16")
    assert event["data"]["layers"] == [FAULTY]
    assert all(math.isfinite(value) for value in series(workdir, "train/loss").values())
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    assert rows[FAULTY]["to"] is None


def test_adapters_beside_te_layers(job: Job, train_here: TrainHere, tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    ids, seen = torch.arange(32)[None], {}

    def remember(assembled: Assembled) -> None:
        adapter, model = assembled.adapter, assembled.learner.model
        assert adapter is not None
        merge = adapter.merge

        def compared() -> None:
            model.eval()
            with torch.no_grad():
                seen["logits"] = model(ids.cuda()).logits.cpu()
            merge()

        adapter.__dict__["merge"] = compared

    parts = {**ON_GPU, "model": {"source": "path", "path": str(base)}, "tokenizer": "bytes"}
    training = {"steps": 4, "optimizer": {"lr": 0.02}, "parity": {"steps": 3, "bound": 1.0}}
    _, workdir = train_here(job(**parts, adapter={"rank": 4}, training=training), plant=remember)
    merged = AutoModelForCausalLM.from_pretrained(workdir / "model").eval()
    with torch.no_grad():
        # Transformer Engine multiplies fp32 on the GPU in TF32, whose mantissa has ten bits.
        torch.testing.assert_close(merged(ids).logits, seen["logits"], rtol=1e-3, atol=5e-4)


def test_a_job_of_gpt2_goes_on_with_its_scales(
    job: Job, train_here: TrainHere, series: Series, tmp_path: Path
) -> None:
    """Its Conv1D keeps weights transposed; two runs of the same kernels differ by their order."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config |= {f"{kind}_pdrop": 0.0 for kind in ("attn", "embd", "resid")}
    spec = job(**{**ON_GPU, "checkpoint": {"every_steps": 3, "keep_last": 2, "keep_best": 0}})
    model = {"source": "config", "config": config}
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "model": model}))
    _, whole = train_here(spec)
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-00000006")
    train_here(spec, resumed)
    losses = series(whole, "train/loss")
    assert series(resumed, "train/loss") == pytest.approx(losses, rel=1e-3)
    states = [
        load_file(w / "checkpoints/step-00000006/engine.safetensors") for w in (whole, resumed)
    ]
    assert states[0].keys() == states[1].keys()
    assert any(".c_attn" in key for key in states[0])
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=2e-2, atol=0.0)


def test_the_precision_table_of_fused_blocks(job: Job, train_here: TrainHere) -> None:
    parts = {**ON_GPU, "conversion": {"fuse": "auto", "small_gemm": "off"}, "model": FUSED}
    _, workdir = train_here(job(**parts, training={"steps": 2}))
    assert not events(workdir, "precision_not_measured")
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    assert rows["model.layers.1"]["reason"] is None, rows["model.layers.1"]
    table = json.loads((workdir / "precision.json").read_bytes())
    layers = table["rows"]["gemm_compute"]["layers"]
    counts = {k["kind"]: k["layers"] for k in layers if k["converted"]}
    # q, k, v; o; gate, up and down, of two blocks.
    assert counts == {"LayerNormLinear": 6, "Linear": 2, "LayerNormMLP": 6}, layers
    in_fp8 = {"fprop": [E4M3, E4M3], "dgrad": [E5M2, E4M3], "wgrad": [E5M2, E4M3]}
    for entry in layers:
        expected = in_fp8 if entry["converted"] else {key: [BF16, BF16] for key in in_fp8}
        assert gemms(entry) == expected, entry
