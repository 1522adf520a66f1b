"""Two GPUs of one node, through NCCL. Each test trains twice or more: a minute on two H200."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8core.telemetry import read_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Job = Callable[..., Path]
PLAIN: dict[str, Any] = {
    "conversion": {"small_gemm": "off"},
    "model": {"config": {"attention_dropout": 0.0}},
    "evaluation": {"fraction": 0.0},
    "checkpoint": {"every_steps": 0},
}


def trained(spec: Path, workdir: Path) -> dict[int, float]:
    """The losses of a run through the command, launcher included."""
    command = [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        record["step"]: record["values"]["train/loss"]
        for record, _ in read_records(workdir / "telemetry.jsonl")
        if record["type"] == "metrics" and "train/loss" in record["values"]
    }


@pytest.mark.parametrize(
    "recipe",
    [
        {"engine": "amp", "dtype": "fp32"},
        {"engine": "te", "amax_history_len": 4},
        {"engine": "te", "amax_history_len": 4, "override_linear_precision": [False, False, True]},
        {"engine": "torchao"},
    ],
    ids=["fp32", "te", "te-override", "torchao"],
)
def test_two_gpus_train_as_one_with_the_whole_batch(
    job: Job, tmp_path: Path, recipe: dict[str, Any]
) -> None:
    steps = {"steps": 4, "gradient_accumulation": 2}
    on = {"device": "cuda"}
    two = trained(
        job(**PLAIN, recipe=recipe, training=steps | {"batch_size": 2}, resources=on | {"gpus": 2}),
        tmp_path / "two",
    )
    one = trained(
        job(**PLAIN, recipe=recipe, training=steps | {"batch_size": 4}, resources=on),
        tmp_path / "one",
    )
    exact = recipe["engine"] == "amp"
    for step, loss in one.items():
        assert two[step] == pytest.approx(loss, rel=1e-4 if exact else 2e-2)
    row = json.loads((tmp_path / "two/precision.json").read_bytes())["rows"]["communication"]
    assert (row["ranks"], list(row["formats"])) == (2, ["fp32"])


def test_scales_of_transformer_engine_are_those_of_both(job: Job, tmp_path: Path) -> None:
    """Each save compares the ranks' histories; here they are compared with one GPU's."""
    recipe = {"engine": "te", "amax_history_len": 4}
    still = {"steps": 3, "optimizer": {"lr": 1e-14}}
    on = {"device": "cuda"}
    states = []
    for name, size, gpus in (("two", 2, 2), ("one", 4, 1)):
        resources = on | {"gpus": gpus}
        spec = job(
            **PLAIN, recipe=recipe, training=still | {"batch_size": size}, resources=resources
        )
        trained(spec, tmp_path / name)
        states.append(load_file(tmp_path / name / "checkpoints/step-00000003/engine.safetensors"))
    two, one = states
    assert two.keys() == one.keys()
    for name, value in one.items():
        # A bf16 GEMM of another size may round one value the other way.
        torch.testing.assert_close(two[name], value, rtol=2e-2, atol=0.0)
