"""LoRA beside a frozen FP8 base: what is trained, kept, resumed and exported."""

from __future__ import annotations

import hashlib
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
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
)

from fp8core import engines
from fp8core.conversion import convert, restore, restore_layers
from fp8core.engines.emulated import EmulatedEngine
from fp8core.errors import CheckpointCorrupt, SpecRefused
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec import parse_spec
from fp8core.training.adapter import Adapter, attach
from fp8core.training.assemble import Assembled
from fp8core.training.outcome import RunResult
from fp8core.training.stopping import StopRequest
from tests.fp8core.training.plants import spoil_in_fp8, stop_in_step

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
FP32 = {"engine": "amp", "dtype": "fp32"}
QUICK: dict[str, Any] = {
    "tokenizer": "bytes",
    "evaluation": {"every_steps": 0, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 2},
}
FAST = {"steps": 4, "optimizer": {"lr": 0.02}}
IDS = torch.arange(48).reshape(2, 24)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def capture(into: list[Assembled]) -> Callable[[Assembled], None]:
    return into.append


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        values: Tensor = model(IDS).logits
    return values


def test_only_adapters_are_trained_beside_an_fp8_base(
    job: Job, train_here: TrainHere, series: Series, base: Path
) -> None:
    held: list[Assembled] = []
    model = {"source": "path", "path": str(base)}
    _, workdir = train_here(
        job(**QUICK, model=model, adapter={"rank": 4}, training=FAST), plant=capture(held)
    )
    rows = json.loads((workdir / "conversion.json").read_bytes())
    # Adapters are no layers of the model: the report names those of the base, and them only.
    assert len(rows) == 20
    names = {row["name"] for row in rows if row["to"] == "EmulatedLinear"}
    assert len(names) == 14
    assert "model.layers.0.self_attn.q_proj" in names
    assert series(workdir, "fp8/model.layers.0.self_attn.q_proj/input/amax").keys() == {2, 4}
    report = json.loads((workdir / "report.json").read_bytes())
    features = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
    trained = 2 * sum(4 * (inner + outer) for inner, outer in features)
    assert report["model"]["trainable_parameters"] == trained
    table = json.loads((workdir / "precision.json").read_bytes())["rows"]
    assert table["weight_gradients"] == {
        "formats": {"fp32": {"bytes": 4 * trained, "elements": trained}},
        "bytes": 4 * trained,
    }
    seen = {
        (k["kind"], k["adapter"], " ".join(g["gemm"] for g in k["gemms"])): k["layers"]
        for k in table["gemm_compute"]["layers"]
    }
    # Frozen layers have no weight gradient at all; the first three, nothing behind them either.
    assert seen == {
        ("EmulatedLinear", False, "fprop"): 3,
        ("EmulatedLinear", False, "fprop dgrad"): 11,
        ("Linear", True, "fprop wgrad"): 3,
        ("Linear", True, "fprop dgrad wgrad"): 25,
        ("Linear", False, "fprop dgrad"): 1,
    }


@pytest.mark.parametrize("precision", ["method", "throughput"])
def test_the_merged_export_is_a_plain_model(
    job: Job, train_here: TrainHere, base: Path, precision: str
) -> None:
    held: list[Assembled] = []
    before: dict[str, Tensor] = {}

    def remember(assembled: Assembled) -> None:
        held.append(assembled)
        merge = Adapter.merge

        def compare(adapter: Adapter) -> None:
            before["logits"] = logits(held[0].learner.model)
            merge(adapter)

        assembled.adapter.__dict__["merge"] = lambda: compare(held[0].adapter)  # type: ignore[arg-type, union-attr]

    model = {"source": "path", "path": str(base)}
    spec = job(**QUICK, model=model, adapter={"rank": 4}, training={**FAST, "precision": precision})
    _, workdir = train_here(spec, plant=remember)
    merged = AutoModelForCausalLM.from_pretrained(workdir / "model")
    original = AutoModelForCausalLM.from_pretrained(base)
    assert merged.state_dict().keys() == original.state_dict().keys()
    assert set(load_file(workdir / "model/model.safetensors")) == set(
        load_file(base / "model.safetensors")
    )
    # In bf16 the sum is rounded once more than while training; lr 0.02 makes it large.
    tolerance = 1e-5 if precision == "method" else 0.05
    torch.testing.assert_close(
        logits(merged).float(), before["logits"].float(), rtol=tolerance, atol=tolerance
    )
    assert (logits(merged).float() - logits(original)).abs().max() > 10 * tolerance
    torch.testing.assert_close(
        merged.model.embed_tokens.weight.float(),
        original.model.embed_tokens.weight,
        rtol=0.01 if precision == "throughput" else 0,
        atol=0,
    )


def test_the_adapter_export_loads_over_the_base(
    job: Job, train_here: TrainHere, base: Path
) -> None:
    held: list[Assembled] = []
    wanted = {"rank": 4, "alpha": 8, "export": "adapter", "target_modules": ["*_proj", "*.fc*"][:1]}
    model = {"source": "path", "path": str(base)}
    spec = job(**QUICK, model=model, adapter=wanted, training=FAST)
    _, workdir = train_here(spec, plant=capture(held))
    assert not (workdir / "model/model.safetensors").exists()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), workdir / "model"
    )
    torch.testing.assert_close(logits(loaded), logits(held[0].learner.model), rtol=1e-6, atol=1e-6)
    config = json.loads((workdir / "model/adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_a_checkpoint_holds_what_is_trained_and_resumes_exactly(
    job: Job, train_here: TrainHere, series: Series, base: Path, tmp_path: Path
) -> None:
    model = {"source": "path", "path": str(base)}
    adapter = {"rank": 4, "dropout": 0.2, "target_modules": ["*.q_proj", "*.mlp.*"]}
    spec = job(**QUICK, model=model, adapter=adapter, training={**FAST, "steps": 6})
    _, whole = train_here(spec)
    stop = StopRequest()

    parted = tmp_path / "parted"
    train_here(spec, parted, plant=stop_in_step(3, stop), stop=stop)
    checkpoint = parted / "checkpoints/step-00000003"
    stored = load_file(checkpoint / "adapter.safetensors")
    assert len(stored) == 2 * 4 * 2
    assert all(".lora_" in name for name in stored)
    assert not list(checkpoint.glob("model*"))
    train_here(spec, parted)
    assert series(parted, "train/loss") == series(whole, "train/loss")
    final = [load_file(w / "model/model.safetensors") for w in (whole, parted)]
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


def _a_value(weight: Tensor) -> None:
    weight[0, 0] += 0.5


def _places(weight: Tensor) -> None:
    weight.copy_(weight.flip(0))


def _of_an_earlier_version(workdir: Path) -> None:
    """Those wrote no digest that sees places."""
    folder = workdir / "checkpoints/step-00000002"
    state = json.loads((folder / "state.json").read_bytes())
    del state["base_places"]
    content = json.dumps(state).encode()
    (folder / "state.json").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == "state.json":
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("change", [_a_value, _places])
@pytest.mark.parametrize("earlier", [False, True], ids=["this version", "an earlier one"])
def test_a_base_that_has_changed_is_not_gone_on_with(
    job: Job,
    train_here: TrainHere,
    base: Path,
    tmp_path: Path,
    change: Callable[[Tensor], None],
    earlier: bool,
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(base, folder)
    spec = job(
        **{**QUICK, "checkpoint": {"every_steps": 2}},
        model={"source": "path", "path": str(folder)},
        adapter={},
        training={"steps": 2},
    )
    workdir = tmp_path / "w"
    train_here(spec, workdir)
    if earlier:
        _of_an_earlier_version(workdir)
        # The same base is gone on with.
        train_here(spec, workdir)
    weights = load_file(folder / "model.safetensors")
    change(weights["model.layers.0.mlp.up_proj.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if earlier and change is _places:
        # What an earlier version could not see.
        train_here(spec, workdir)
        return
    with pytest.raises(CheckpointCorrupt, match="beside other weights"):
        train_here(spec, workdir)


def test_adapters_fall_back_parity_and_checkpointing_together(
    job: Job, train_here: TrainHere, base: Path, series: Series
) -> None:
    held: list[Assembled] = []

    def faulty(assembled: Assembled) -> None:
        held.append(assembled)
        spoil_in_fp8(assembled, "model.layers.0.mlp.down_proj.base_layer")

    training = {
        **FAST,
        "on_divergence": "fallback_bf16",
        "gradient_checkpointing": True,
        "parity": {"steps": 3, "bound": 1.0},
    }
    spec = job(**QUICK, model={"source": "path", "path": str(base)}, adapter={}, training=training)
    _, workdir = train_here(spec, plant=faulty)
    rows = {r["name"]: r for r in json.loads((workdir / "conversion.json").read_bytes())}
    assert rows["model.layers.0.mlp.down_proj"]["to"] is None
    assert rows["model.layers.1.mlp.down_proj"]["to"] == "EmulatedLinear"
    assert json.loads((workdir / "report.json").read_bytes())["parity"]["verdict"] == "within"
    # lora_B begins at zero: the first losses differ by FP8 alone.
    assert abs(series(workdir, "parity/gap")[1]) < 0.01


@pytest.mark.parametrize("put_back", ["", "h.0.attn.c_proj", "h"])
def test_adapters_merge_into_conv1d_layers_converted_or_put_back(put_back: str) -> None:
    """Whose weights lie the other way round then; that of c_proj is square: no shape tells."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 272}
    fields: dict[str, Any] = {
        "model": {"source": "config", "config": config},
        "data": {"source": "builtin"},
        "recipe": {"engine": "emulated"},
        "adapter": {"rank": 4, "alpha": 6.0},
    }
    spec = parse_spec(fields)
    assert spec.adapter is not None
    model = AutoModelForCausalLM.from_config(GPT2Config(**config))
    targets = adapter_targets(model, spec.adapter)
    names = [layer.name for layer in targets]
    expected = {name: model.get_parameter(f"{name}.weight").detach().clone() for name in names}
    report = convert(model, engines.create(spec.recipe, "cpu"), spec.conversion)
    adapter = attach(spec, model, targets)
    with torch.no_grad():
        for name in names:
            down, up = (model.get_parameter(f"{name}.lora_{key}.default.weight") for key in "AB")
            up.normal_()
            expected[name] += 1.5 * (up @ down).t()
    begin = f"transformer.{put_back}"
    again = [name for name in names if put_back and name.startswith(begin)]
    assert len(again) == {"": 0, "h.0.attn.c_proj": 1, "h": 8}[put_back]
    restore_layers(report, dict.fromkeys(again, "for a test"))
    adapter.merge()
    restore(model, report)
    for name in names:
        torch.testing.assert_close(model.get_parameter(f"{name}.weight"), expected[name])


def test_a_classifiers_head_is_trained_whole(
    job: Job, train_here: TrainHere, base: Path, tmp_path: Path
) -> None:
    lines = [{"text": f"text {i}", "label": ("even", "odd")[i % 2]} for i in range(40)]
    data = tmp_path / "labelled.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts: dict[str, Any] = {
        **QUICK,
        "model": {"source": "path", "path": str(base)},
        "task": "sequence_classification",
        "data": {"source": "jsonl", "path": str(data), "format": "labelled", "packing": False},
        "training": FAST,
    }
    held: list[Assembled] = []
    _, workdir = train_here(job(**parts, adapter={"export": "merged"}), plant=capture(held))
    merged = AutoModelForSequenceClassification.from_pretrained(workdir / "model")
    assert merged.config.num_labels == 2
    _, workdir = train_here(job(**parts, adapter={"export": "adapter"}), plant=capture(held))
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    loaded = PeftModel.from_pretrained(bare, workdir / "model")
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("patterns", "pointer"),
    [(["*.q_porj"], "/adapter/target_modules/0"), (["lm_head"], "/adapter/target_modules/0")],
)
def test_patterns_that_name_no_layer_are_refused(
    job: Job, train_here: TrainHere, base: Path, patterns: list[str], pointer: str
) -> None:
    spec = job(
        **QUICK, model={"source": "path", "path": str(base)}, adapter={"target_modules": patterns}
    )
    with pytest.raises(SpecRefused, match="matches no linear layer") as caught:
        train_here(spec)
    assert caught.value.pointer == pointer


class ForeignLinear(nn.Module):
    """A converted Linear that is no ``nn.Linear``, as Transformer Engine's is none."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


def test_adapters_go_around_layers_of_any_class(
    job: Job, train_here: TrainHere, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert: Callable[..., nn.Module] = lambda self, linear, name: ForeignLinear(linear)  # noqa: E731
    monkeypatch.setattr(EmulatedEngine, "convert_linear", convert)
    seen: dict[str, Any] = {}

    def remember(assembled: Assembled) -> None:
        layer = assembled.learner.model.get_submodule("model.layers.0.mlp.up_proj.base_layer")
        seen["class"] = type(layer)
        adapter = assembled.adapter
        assert adapter is not None
        merge = adapter.merge

        def compared() -> None:
            seen["logits"] = logits(assembled.learner.model)
            merge()

        adapter.__dict__["merge"] = compared

    spec = job(**QUICK, model={"source": "path", "path": str(base)}, adapter={}, training=FAST)
    _, workdir = train_here(spec, plant=remember)
    assert seen["class"] is ForeignLinear
    merged = AutoModelForCausalLM.from_pretrained(workdir / "model")
    torch.testing.assert_close(logits(merged), seen["logits"], rtol=1e-5, atol=1e-5)
