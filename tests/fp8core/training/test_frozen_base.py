"""LoRA jobs whose frozen base lies in FP8: what is stored, trained, resumed, exported and told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from fp8core import engines
from fp8core.conversion import convert
from fp8core.engines.emulated_layers import EmulatedLinear
from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.fusion.parts import Kernel, MLPHalf, NamedLinear, NormedKernel
from fp8core.fusion.plain import PlainParts
from fp8core.models import export
from fp8core.models.adapter_targets import adapter_targets
from fp8core.numerics.casts import E4M3, measure_amax, quantize
from fp8core.numerics.current_scaling import current_scale
from fp8core.numerics.float8_weight import Float8Weight, joined_again
from fp8core.spec import AmpRecipe, Conversion, parse_spec
from fp8core.training.adapter import attach
from fp8core.training.assemble import Assembled
from fp8core.training.frozen_base import store_base
from fp8core.training.outcome import RunResult
from fp8core.training.stopping import StopRequest
from tests.fp8core.fusion.families import batches
from tests.fp8core.fusion.test_adapters import ALL, outputs, planned, wrap
from tests.fp8core.fusion.test_runs import FusingAmp
from tests.fp8core.training.plants import spoil_in_fp8, stop_in_step
from tests.fp8core.training.test_adapter import FAST, QUICK, base, logits

__all__ = ["base"]  # a fixture

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
CURRENT = {"engine": "emulated", "scaling": "current"}
DELAYED = {"engine": "emulated", "amax_history_len": 4}
STORED = {"rank": 4, "base_weights": "fp8"}
OF_BASE = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
"""Elements of the weights of all converted layers of the base."""


def of(folder: Path) -> dict[str, str]:
    return {"source": "path", "path": str(folder)}


@pytest.mark.parametrize("precision", ["method", "throughput"])
def test_current_scaling_computes_what_it_does_beside_weights_that_it_casts_each_time(
    job: Job, train_here: TrainHere, series: Series, base: Path, precision: str
) -> None:
    """To the bit: the values are the same, and so is all that is computed of them."""
    found, models = [], []
    for adapter in ({"rank": 4}, STORED):
        training = {**FAST, "precision": precision, "gradient_accumulation": 2}
        spec = job(**QUICK, model=of(base), recipe=CURRENT, adapter=adapter, training=training)
        _, workdir = train_here(spec)
        found.append((series(workdir, "train/loss"), series(workdir, "train/grad_norm")))
        models.append(load_file(workdir / "model/model.safetensors"))
    assert len(found[0][0]) == 4
    assert len(set(found[0][0].values())) == 4
    assert found[1] == found[0]
    # Merged into the base as it was loaded, and so the same too.
    assert models[1].keys() == models[0].keys()
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=0, atol=0, msg=key)


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


def test_delayed_scaling_keeps_no_history_of_stored_weights(
    job: Job, train_here: TrainHere, base: Path
) -> None:
    held: list[Assembled] = []
    spec = job(**QUICK, model=of(base), recipe=DELAYED, adapter=STORED, training=FAST)
    train_here(spec, plant=held.append)
    state = held[0].learner.engine.state_dict()
    name = "model.layers.0.mlp.up_proj.forward"
    inputs, weights = state[f"{name}.amax_history"][:, 0], state[f"{name}.amax_history"][:, 1]
    assert inputs.any()
    assert not weights.any()
    assert state[f"{name}.scale"][1] == 1
    assert state[f"{name}.scale"][0] != 1


def test_the_engine_reads_the_codes_of_a_cast_with_that_amax(base: Path) -> None:
    model, _, engine = stored_model(base, CURRENT)
    original = load_file(base / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, EmulatedLinear):
            weight = original[f"{name.removesuffix('.base_layer')}.weight"]
            scale = current_scale(measure_amax(weight).value, E4M3.max)
            found = module.weight
            assert isinstance(found, Float8Weight)
            codes = quantize(weight, scale, E4M3)
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8)), name
            assert found.scale_inverse == scale.reciprocal()
    # The values stand in high precision, where evaluation reads them.
    with engine.evaluation_context():
        found_logits = logits(model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored = model.get_submodule(f"{name}.base_layer").weight
            module.weight = nn.Parameter(stored.dequantize())
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(plain)
    torch.testing.assert_close(found_logits, expected, rtol=0.05, atol=0.01)


def stored_model(folder: Path, recipe: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model whose base lies in FP8, its report and its engine."""
    fields = {
        "model": of(folder),
        "data": {"source": "builtin"},
        "recipe": recipe,
        "adapter": STORED,
    }
    spec = parse_spec(fields)
    assert spec.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(folder)
    targets = adapter_targets(model, spec.adapter)
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, spec.conversion)
    attach(spec, model, targets)
    store_base(report, engine)
    return model, report, engine


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


@pytest.mark.parametrize("source", ["path", "config"])
def test_merged_weights_are_those_of_the_source_with_the_adapters_added(
    job: Job, train_here: TrainHere, base: Path, source: str
) -> None:
    held: list[Assembled] = []
    model = of(base) if source == "path" else {"source": "config"}
    spec = job(**QUICK, model=model, recipe=DELAYED, adapter=STORED, training=FAST)
    _, workdir = train_here(spec, plant=held.append)
    adapter = held[0].adapter
    assert adapter is not None
    trained = {name: value.detach() for name, value in adapter.tensors().items()}
    merged = load_file(workdir / "model/model.safetensors")
    if source == "path":
        original = load_file(base / "model.safetensors")
        for key, weight in original.items():
            place = key.removesuffix(".weight")
            down = trained.get(f"{place}.lora_A.default.weight")
            added = torch.zeros(())
            if down is not None:
                added = 16 / 4 * trained[f"{place}.lora_B.default.weight"] @ down
                assert added.any()
            torch.testing.assert_close(merged[key], weight + added, msg=key)
    name = "model.layers.0.mlp.up_proj.weight"
    # More than the 2 x 15 values of E4M3's mantissas, signs and few exponents would give.
    assert merged[name].unique().numel() > 1500
    loaded = AutoModelForCausalLM.from_pretrained(workdir / "model")
    assert logits(loaded).isfinite().all()


def test_the_adapter_export_is_as_beside_any_base(
    job: Job, train_here: TrainHere, base: Path
) -> None:
    adapter = {**STORED, "export": "adapter"}
    spec = job(**QUICK, model=of(base), recipe=DELAYED, adapter=adapter, training=FAST)
    _, workdir = train_here(spec)
    assert not (workdir / "model/model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    loaded = PeftModel.from_pretrained(plain, workdir / "model")
    assert (logits(loaded) - before).abs().max() > 1e-3


def test_a_base_that_changed_on_disk_is_not_merged_with(
    job: Job, train_here: TrainHere, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(base, folder)

    def change(assembled: Assembled) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    spec = job(**QUICK, model=of(folder), recipe=DELAYED, adapter=STORED, training=FAST)
    with pytest.raises(ModelUnavailable, match="another one than it was"):
        train_here(spec, plant=change)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1},
        {"hidden_act": "relu"},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        {"attention_bias": True},
    ],
    ids=["a layer less", "another function", "other heads", "more of them"],
)
def test_what_changed_in_its_configuration_changes_nothing(
    job: Job, train_here: TrainHere, base: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Of fewer layers the same adapters would make a whole model too, and another one."""
    found = []
    for edits in ({}, change):
        folder = tmp_path / f"own-{len(edits)}"
        shutil.copytree(base, folder)
        path = folder / "config.json"

        def edit(assembled: Assembled, path: Path = path, edits: dict[str, Any] = edits) -> None:
            path.write_text(json.dumps(json.loads(path.read_bytes()) | edits))

        spec = job(**QUICK, model=of(folder), recipe=DELAYED, adapter=STORED, training=FAST)
        _, workdir = train_here(spec, plant=edit)
        config = json.loads((workdir / "model/config.json").read_bytes())
        found.append((config, load_file(workdir / "model/model.safetensors")))
    assert found[1][0] == found[0][0]
    assert found[1][1].keys() == found[0][1].keys()
    assert all(torch.equal(found[1][1][key], value) for key, value in found[0][1].items())


@pytest.mark.parametrize("lost", ["model.safetensors", "all of it"])
def test_a_base_that_is_gone_is_not_merged_with(
    job: Job, train_here: TrainHere, base: Path, tmp_path: Path, lost: str
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(base, folder)

    def lose(assembled: Assembled) -> None:
        (folder / "model.safetensors").unlink()
        if lost != "model.safetensors":
            shutil.rmtree(folder)

    spec = job(**QUICK, model=of(folder), recipe=DELAYED, adapter=STORED, training=FAST)
    workdir = tmp_path / "work"
    with pytest.raises(ModelUnavailable, match=r"has neither model\.safetensors nor"):
        train_here(spec, workdir, plant=lose)
    assert not (workdir / "model").exists()
    # What was trained is not lost.
    assert (workdir / "checkpoints/step-00000004/adapter.safetensors").exists()


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


def test_conv1d_layers_are_stored_as_their_gemms_read_them(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=272)
    torch.manual_seed(1)
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model, report, engine = stored_model(folder, CURRENT)
    assert report.base_weights.gemms == 8
    layer = model.get_submodule("transformer.h.0.attn.c_attn.base_layer")
    held = layer._parameters["weight"]
    assert isinstance(held, Float8Weight)
    assert held.shape == (32, 96)
    assert layer.weight.shape == (96, 32)
    assert layer.weight.codes.is_contiguous()
    original = load_file(folder / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    torch.testing.assert_close(held.dequantize(), original, rtol=0.07, atol=2e-4)
    ids = torch.arange(32).reshape(2, 16)
    with engine.training_context():
        loss = model(ids, labels=ids).loss
    loss.backward()
    engine.after_backward()
    assert loss.isfinite()


def test_weights_that_others_read_and_trained_ones_stay_as_they_are(base: Path) -> None:
    spec = parse_spec(
        {
            "model": of(base),
            "data": {"source": "builtin"},
            "recipe": CURRENT,
            "adapter": STORED,
            "conversion": {"output_head": True},
        }
    )
    assert spec.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(base)
    targets = adapter_targets(model, spec.adapter)
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, spec.conversion)
    attach(spec, model, targets)
    model.get_submodule("model.layers.0.mlp.up_proj.base_layer").weight.requires_grad_(True)
    found = store_base(report, engine)
    assert found.gemms == 13
    assert {name: reason.split(",")[0] for name, reason in found.kept.items()} == {
        "model.layers.0.mlp.up_proj": "it is trained",
        "lm_head": "its weight is also that of another module",
    }
    assert type(model.lm_head.weight) is nn.Parameter


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


def test_an_export_of_the_rounded_base_is_refused(base: Path, tmp_path: Path) -> None:
    model, report, _ = stored_model(base, CURRENT)
    with pytest.raises(TypeError, match="lies in FP8"):
        export(model, report, None, tmp_path / "out")


class Calling(nn.Module):
    """What a function computes, where a module is looked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


class PartsThatAreModules(PlainParts):
    """As those of an engine on a GPU are."""

    def norm_linear(self, *of: Any) -> Kernel:
        return Calling(super().norm_linear(*of))

    def norm_linear_and_norm(self, *of: Any) -> NormedKernel:
        return Calling(super().norm_linear_and_norm(*of))

    def linear(self, linear: NamedLinear) -> Kernel:
        return Calling(super().linear(linear))

    def norm_mlp(self, half: MLPHalf) -> Kernel:
        return Calling(super().norm_mlp(half))


class FusingStorer(FusingAmp):
    """Fuses on a CPU, and reads stored weights as their values."""

    stores_powers_of_two = False

    def block_parts(self) -> PlainParts:
        return PartsThatAreModules()

    def reads_stored_weights(self, module: nn.Module) -> bool:
        return True


@pytest.mark.parametrize("keys", [ALL, ("q_proj", "v_proj")], ids=["in steps", "MLP in one"])
def test_what_one_gemm_reads_has_one_scale(base: Path, keys: tuple[str, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    engine = FusingStorer(AmpRecipe(engine="amp", dtype="fp32"), torch.device("cpu"))
    adapters = planned(model, keys)
    report = convert(model, engine, Conversion(), adapters=adapters)
    assert report.fusion is not None
    assert report.fusion.whole
    wrap(model, adapters)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 2}
    found = store_base(report, engine)
    assert (found.gemms, found.elements, found.kept) == (8, OF_BASE, {})

    def stored(name: str) -> Float8Weight:
        (one,) = [
            p for n, p in model.named_parameters() if f"layers.1.{name}." in n and "lora" not in n
        ]
        assert isinstance(one, Float8Weight)
        return one

    together = [[f"self_attn.{n}_proj" for n in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]]
    for names in (*together, ["self_attn.o_proj"], ["mlp.down_proj"]):
        parts = [stored(name) for name in names]
        amaxes = [
            float(value.abs().max())
            for key, value in before.items()
            if "lora" not in key and any(f"layers.1.{name}." in key for name in names)
        ]
        assert {part.cast.amax for part in parts} == {max(amaxes)}
        whole = joined_again(parts)
        assert whole.codes.data_ptr() == parts[0].codes.data_ptr()
        assert whole.codes.untyped_storage().nbytes() == whole.numel()
    batch = batches()["packed"]
    fused, _ = outputs(model, batch, fused=True)
    report.fusion.remove_all()
    plain, _ = outputs(model, batch, fused=False)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
