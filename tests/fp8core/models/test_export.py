"""An exported model is a plain Hugging Face folder with the logits of the one in training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from fp8core import engines
from fp8core.conversion import ConversionReport, Join, KeyMap, Piece, convert, restore
from fp8core.errors import StorageFull
from fp8core.models import export, load

IDS = torch.arange(3, 51).reshape(2, 24)


def prepare(spec, **fields):
    """A converted model after a few steps of training, in evaluation mode."""
    model = load(spec, device="cpu", dtype=torch.float32, **fields).model
    engine = engines.create(spec.recipe, torch.device("cpu"))
    report = convert(model, engine, spec.conversion)
    assert report.converted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(2):
        with engine.training_context():
            loss = model(IDS).logits.float().square().mean()
        loss.backward()
        engine.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), report


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize("tied", [False, True])
def test_llama(save_llama, make_spec, tmp_path, tied):
    original, source = save_llama(tie_word_embeddings=tied)
    model, report = prepare(make_spec(source, conversion={"output_head": True}))
    classes = [type(m) for m in model.modules()]
    export(model, report, None, tmp_path / "out")
    assert [type(m) for m in model.modules()] == classes
    assert keys(tmp_path / "out") == keys(source)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {type(m).__module__.split(".")[0] for m in plain.modules()} <= {"torch", "transformers"}
    expected = model(IDS).logits
    restored = restore(model, report)(IDS).logits
    assert torch.equal(plain(IDS).logits, restored)
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(plain.lm_head.weight, original.lm_head.weight)


def test_gpt2(make_spec, tmp_path):
    config = {
        "model_type": "gpt2", "vocab_size": 272, "n_embd": 32, "n_layer": 2, "n_head": 2,
        "n_positions": 64,
    }  # fmt: skip
    model, report = prepare(make_spec(config))
    conv1d = [row for row in report.rows if row.from_ == "Conv1D"]
    assert len(conv1d) == 8
    assert all(row.to == "EmulatedLinear" for row in conv1d)
    export(model, report, None, tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(plain(IDS).logits, restore(model, report)(IDS).logits)


def test_minilm_with_its_tokenizer(minilm_folder, make_spec, tmp_path):
    class Saved:
        def save(self, folder):
            transformers.AutoTokenizer.from_pretrained(minilm_folder).save_pretrained(folder)

    spec = make_spec(minilm_folder, task="sequence_classification")
    model, report = prepare(spec, class_labels=["no", "yes"])
    kept = {row.name: row.reason for row in report.kept}
    assert set(kept) == {"bert.pooler.dense", "classifier"}
    assert "one row per sequence" in kept["bert.pooler.dense"]
    assert len(report.converted) == 6 * 6 + 13
    export(model, report, Saved(), tmp_path / "out")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert plain.config.id2label == {0: "no", 1: "yes"}
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(
        "A word", return_tensors="pt"
    )
    expected = restore(model, report)(**tokens).logits
    torch.testing.assert_close(plain(**tokens).logits, expected)


def test_an_earlier_export_is_replaced_as_a_whole(save_llama, make_spec, tmp_path):
    _, source = save_llama()
    model, report = prepare(make_spec(source))
    target = tmp_path / "out"
    target.mkdir()
    (target / "stale.safetensors").write_bytes(b"x")
    export(model, report, None, target)
    assert sorted(p.name for p in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]

    class Failing:
        def save(self, folder):
            raise RuntimeError("no tokenizer")

    before = {p.name: p.read_bytes() for p in target.iterdir()}
    with pytest.raises(RuntimeError, match="no tokenizer"):
        export(model, report, Failing(), target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out"]


def test_contradictory_generation_settings_do_not_lose_a_finished_run(
    save_llama, make_spec, tmp_path
):
    _, source = save_llama()
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": 5}
    (source / "generation_config.json").write_text(json.dumps(settings))
    model, report = prepare(make_spec(source))
    assert model.generation_config.temperature == 0.6
    export(model, report, None, tmp_path / "out")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.temperature == 0.6


def test_joined_weights_are_written_apart(save_llama, make_spec, tmp_path):
    """A fused layer's key map: q, k and v live in one Parameter and leave as three."""
    original, source = save_llama()
    model = load(make_spec(source), device="cpu", dtype=torch.float32).model
    prefix = "model.layers.0.self_attn"
    attention = model.model.layers[0].self_attn
    names = ("q_proj", "k_proj", "v_proj")
    weights = [getattr(attention, name).weight for name in names]
    pieces = tuple(
        Piece(f"{prefix}.{name}.weight", w.shape[0]) for name, w in zip(names, weights, strict=True)
    )
    fused = torch.nn.Linear(64, 128, bias=False)
    fused.weight = torch.nn.Parameter(torch.cat(weights).detach())
    for name in names:
        delattr(attention, name)
    attention.qkv = fused
    report = ConversionReport(model, [], KeyMap([Join(f"{prefix}.qkv.weight", pieces)]))
    export(model, report, None, tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(plain(IDS).logits, original(IDS).logits)


def test_a_full_disk_is_told_as_such_and_leaves_nothing(save_llama, make_spec, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        _, source = save_llama()
        model, report = prepare(make_spec(source))
        with pytest.raises(StorageFull):
            export(model, report, None, small / "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_only_transformers_models_are_exported(tmp_path):
    with pytest.raises(TypeError, match="not a transformers model"):
        export(torch.nn.Linear(1, 1), None, None, tmp_path / "out")
