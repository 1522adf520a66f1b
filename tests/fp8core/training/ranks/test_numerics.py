"""N ranks with a batch of b train as one rank does with a batch of N x b."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Job = Callable[..., Path]
Series = Callable[[Path, str], dict[int, float]]
FP32 = {"engine": "amp", "dtype": "fp32"}
EMULATED = {"engine": "emulated", "amax_history_len": 3, "interval": 2}
# Without dropout, whose numbers are each rank's own.
PLAIN = {"config": {"attention_dropout": 0.0}}
TWO = {"device": "cpu", "cpu_ranks": 2}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Texts of very different lengths, one a row: ranks have other numbers of targets."""
    generator = random.Random(1)
    lines = [
        json.dumps({"text": "".join(generator.choices("abcdefgh ", k=generator.randint(3, 31)))})
        for _ in range(200)
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return {"source": "jsonl", "path": "texts.jsonl", "format": "text", "packing": False}


def training(batch_size: int, **parts: Any) -> dict[str, Any]:
    return {"steps": 4, "batch_size": batch_size, "gradient_accumulation": 2, **parts}


def test_losses_and_norms_are_those_of_one_rank_with_the_whole_batch(
    job: Job, run_ranks: Any, train: Any, series: Series, texts: dict[str, Any]
) -> None:
    common = {
        "model": PLAIN,
        "data": texts,
        "recipe": FP32,
        "evaluation": {"every_steps": 2, "fraction": 0.1, "max_batches": None},
    }
    two = run_ranks(job(**common, training=training(2), resources=TWO)).workdir
    one = train(job(**common, training=training(4)))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = series(two, name), series(one, name)
        assert found.keys() == wanted.keys()
        for step, value in wanted.items():
            assert found[step] == pytest.approx(value, rel=2e-5), f"{name} of step {step}"
    for workdir in (two, one):
        report = json.loads((workdir / "report.json").read_bytes())
        assert report["tokens"] == json.loads((one / "report.json").read_bytes())["tokens"]
        assert report["ranks"] == (2 if workdir == two else 1)
    weights = [load_file(w / "model/model.safetensors") for w in (two, one)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-3, atol=1e-5)


def test_amax_histories_and_scales_are_those_of_all_ranks_together(
    job: Job, run_ranks: Any, train: Any
) -> None:
    # With so small a rate no fp32 weight moves: every step is exact, not the first alone.
    common = {
        "model": PLAIN,
        "recipe": EMULATED,
        "evaluation": {"fraction": 0.0},
        "checkpoint": {"every_steps": 0},
    }
    still = {"optimizer": {"lr": 1e-14}}
    ended = run_ranks(job(**common, training=training(2, **still), resources=TWO))
    one = train(job(**common, training=training(4, **still)))
    wanted = load_file(one / "checkpoints/step-00000004/engine.safetensors")
    first, second = ended.states
    assert first.keys() == second.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(first[name], second[name]), f"{name} differs between the ranks"
        assert torch.equal(first[name], value), f"{name} differs from that of one rank"
    moved = [value for name, value in first.items() if name.endswith("scale")]
    assert all((value != 1.0).any() for value in moved)


def test_gradients_travel_in_the_format_that_was_asked_for(
    job: Job, run_ranks: Any, series: Series
) -> None:
    found = {}
    for sent in ("fp32", "bf16"):
        precision = {"communication": sent}
        workdir = run_ranks(
            job(
                model=PLAIN,
                recipe=FP32,
                training={"steps": 2, "precision": precision},
                evaluation={"fraction": 0.0},
                resources=TWO,
            )
        ).workdir
        row = json.loads((workdir / "precision.json").read_bytes())["rows"]["communication"]
        weights = load_file(workdir / "model/model.safetensors")
        elements = sum(value.numel() for value in weights.values())
        size = elements * (4 if sent == "fp32" else 2)
        assert row == {
            "ranks": 2,
            "formats": {sent: {"bytes": size, "elements": elements}},
            "bytes": size,
        }
        found[sent] = series(workdir, "train/grad_norm")[1]
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=1e-2)
