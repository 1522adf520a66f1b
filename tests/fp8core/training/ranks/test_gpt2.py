"""Jobs of GPT-2, whose linear layers keep their weights transposed: resumed, and by two ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Job = Callable[..., Path]
Series = Callable[[Path, str], dict[int, float]]
GPT2: dict[str, Any] = {
    "source": "config",
    "config": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}


def gpt2(job: Job, **parts: Any) -> Path:
    """A spec of GPT-2; the defaults' Llama has fields that it does not know."""
    path = job(evaluation={"fraction": 0.0}, **parts)
    spec = json.loads(path.read_text())
    path.write_text(json.dumps({**spec, "model": GPT2}))
    return path


def state(workdir: Path, step: int, part: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(
        workdir / f"checkpoints/step-{step:08d}/{part}.safetensors"
    )
    return tensors


@pytest.mark.slow
def test_it_goes_on_bit_for_bit(job: Job, train: Any, series: Series, tmp_path: Path) -> None:
    spec = gpt2(job, checkpoint={"every_steps": 3, "keep_last": 2})
    whole = train(spec)
    rows = json.loads((whole / "conversion.json").read_bytes())
    converted = [row for row in rows if row["from"] == "Conv1D" and row["to"] is not None]
    assert len(converted) == 8
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    (resumed / "result.json").unlink()
    shutil.rmtree(resumed / "checkpoints/step-00000006")
    train(spec, resumed)
    assert series(resumed, "train/loss") == series(whole, "train/loss")
    for part in ("model", "optimizer", "engine"):
        wanted, found = state(whole, 6, part), state(resumed, 6, part)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), part
    scales = [v for key, v in state(whole, 6, "engine").items() if key.endswith("scale")]
    assert all((scale != 1.0).any() for scale in scales)


def test_amaxes_of_two_ranks_are_those_of_one_with_the_whole_batch(
    job: Job, run_ranks: Any, train: Any
) -> None:
    # With so small a rate no fp32 weight moves: every step is exact, not the first alone.
    training = {"steps": 3, "optimizer": {"lr": 1e-14}}
    checkpoint = {"every_steps": 0}
    ranks = {"device": "cpu", "cpu_ranks": 2}
    two = run_ranks(gpt2(job, training=training, checkpoint=checkpoint, resources=ranks))
    one = train(gpt2(job, training={**training, "batch_size": 4}, checkpoint=checkpoint))
    wanted = state(one, 3, "engine")
    assert sum(".c_attn" in key for key in wanted) > 0
    for states in two.states:
        assert states.keys() == wanted.keys()
        assert all(torch.equal(states[key], value) for key, value in wanted.items())
