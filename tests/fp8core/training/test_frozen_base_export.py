"""Exports and merges of LoRA jobs whose frozen base lies in FP8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8core.errors import ModelUnavailable
from fp8core.models import export
from fp8core.training.assemble import Assembled
from tests.fp8core.training.stored_bases import (
    CURRENT,
    DELAYED,
    STORED,
    Job,
    TrainHere,
    of,
    stored_model,
)
from tests.fp8core.training.test_adapter import FAST, QUICK, base, logits

__all__ = ["base"]  # a fixture


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


def test_an_export_of_the_rounded_base_is_refused(base: Path, tmp_path: Path) -> None:
    model, report, _ = stored_model(base, CURRENT)
    with pytest.raises(TypeError, match="lies in FP8"):
        export(model, report, None, tmp_path / "out")
