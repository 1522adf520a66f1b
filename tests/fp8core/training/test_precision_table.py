"""The precision table: what it counts is what is there, and measuring leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.telemetry import read_records
from fp8core.training.assemble import Assembled
from fp8core.training.outcome import RunResult
from fp8core.training.precision_table import PrecisionTable, _rows

Job = Callable[..., Path]
TrainHere = Callable[..., tuple[RunResult, Path]]
Series = Callable[[Path, str], dict[int, float]]
QUICK: dict[str, Any] = {
    "evaluation": {"every_steps": 0, "max_batches": 1},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
    "telemetry": {"fp8_every_steps": 0},
}
E4M3, E5M2, BF16, FP32 = "fp8_e4m3", "fp8_e5m2", "bf16", "fp32"


def table_of(workdir: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((workdir / "precision.json").read_bytes())
    return table


def gemms(entry: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        row["gemm"]: {name: operand["format"] for name, operand in row["operands"].items()}
        for row in entry["gemms"]
    }


def all_in(operands: str, weights: str, gradients: str) -> dict[str, dict[str, str]]:
    return {
        "fprop": {"input": operands, "weight": weights},
        "dgrad": {"grad_output": gradients, "weight": weights},
        "wgrad": {"grad_output": gradients, "input": operands},
    }


@pytest.mark.parametrize(
    ("recipe", "kind", "expected"),
    [
        ({"engine": "emulated"}, "EmulatedLinear", all_in(E4M3, E4M3, E5M2)),
        (
            {"engine": "emulated", "scaling": "current", "fp8_format": "E4M3"},
            "EmulatedLinear",
            all_in(E4M3, E4M3, E4M3),
        ),
        (
            {"engine": "emulated", "override_linear_precision": [False, False, True]},
            "EmulatedLinear",
            {
                **all_in(E4M3, E4M3, E5M2),
                "wgrad": {"grad_output": BF16, "input": BF16},
            },
        ),
        ({"engine": "torchao"}, "OctrainFloat8Linear", all_in(E4M3, E4M3, E5M2)),
        (
            {"engine": "torchao", "scaling": "rowwise_with_gw_hp"},
            "OctrainFloat8Linear",
            {
                **all_in(E4M3, E4M3, E4M3),
                "wgrad": {"grad_output": BF16, "input": BF16},
            },
        ),
    ],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_gemms_of_each_engine(
    job: Job,
    train_here: TrainHere,
    recipe: dict[str, Any],
    kind: str,
    expected: dict[str, dict[str, str]],
    recomputed: bool,
) -> None:
    """Recomputed blocks go forward within the backward pass of their last layer."""
    training = {"steps": 1, "gradient_checkpointing": recomputed}
    _, workdir = train_here(job(**QUICK, recipe=recipe, training=training))
    kinds = table_of(workdir)["rows"]["gemm_compute"]["layers"]
    assert [(k["kind"], k["converted"], k["layers"]) for k in kinds] == [
        (kind, True, 14),
        ("Linear", False, 1),
    ]
    assert gemms(kinds[0]) == expected
    assert gemms(kinds[1]) == all_in(BF16, BF16, BF16)


def test_the_baselines(job: Job, train_here: TrainHere) -> None:
    for dtype, name in (("bf16", BF16), ("fp32", FP32)):
        _, workdir = train_here(
            job(**QUICK, recipe={"engine": "amp", "dtype": dtype}, training={"steps": 1})
        )
        (entry,) = table_of(workdir)["rows"]["gemm_compute"]["layers"]
        assert (entry["converted"], entry["layers"]) == (False, 15)
        assert gemms(entry) == all_in(name, name, name)
        # With dropout PyTorch's attention is products and a softmax, which nobody can tell apart.
        assert table_of(workdir)["rows"]["attention_compute"] == {"passes": []}


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "states", "masters"),
    [
        ("method", FP32, FP32, FP32, None),
        ("throughput", BF16, BF16, BF16, None),
        ({"weights": "bf16", "master_weights": "fp32"}, BF16, FP32, FP32, FP32),
    ],
)
def test_what_is_stored(
    job: Job,
    train_here: TrainHere,
    precision: Any,
    weights: str,
    gradients: str,
    states: str,
    masters: str | None,
) -> None:
    _, workdir = train_here(job(**QUICK, training={"steps": 2, "precision": precision}))
    table = table_of(workdir)
    # Two blocks, two norms in each and one at the end; the head is the embedding.
    block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    size = 2 * block + 32 + 272 * 32
    width = {FP32: 4, BF16: 2}

    def row(name: str, elements: int) -> dict[str, Any]:
        found = {name: {"bytes": elements * width[name], "elements": elements}}
        return {"formats": found, "bytes": elements * width[name]}

    rows = table["rows"]
    assert rows["weights"] == row(weights, size)
    assert rows["weight_gradients"] == row(gradients, size)
    assert rows["optimizer_states"] == row(states, 2 * size)
    assert rows["master_weights"] == (
        row(masters, size) if masters else {"formats": {}, "bytes": 0}
    )
    assert rows["communication"] == {"ranks": 1, "formats": {}, "bytes": 0}
    assert (table["step"], table["engine"]) == (1, "emulated")
    assert table["engine_state"]["bytes"] > 0
    records = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    announced = [r for r in records if r["type"] == "artifact" and r["path"] == "precision.json"]
    assert [(r["kind"], r["step"]) for r in announced] == [("report", 1)]
    assert "precision_not_measured" not in {r.get("kind") for r in records}


def test_measuring_leaves_no_trace(
    job: Job, train_here: TrainHere, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(**QUICK)
    _, measured = train_here(spec)
    monkeypatch.setattr(PrecisionTable, "before_step", lambda self, batches: None)
    _, not_measured = train_here(spec)
    assert table_of(not_measured)["rows"]["gemm_compute"]["layers"] is None
    assert series(measured, "train/loss") == series(not_measured, "train/loss")


def test_a_model_that_cannot_be_measured_trains_all_the_same(
    job: Job, train_here: TrainHere
) -> None:
    def fragile(assembled: Assembled) -> None:
        def refuse(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if kwargs["input_ids"].shape[1] == 16:
                raise ValueError("16 tokens are not enough")

        assembled.learner.model.register_forward_pre_hook(refuse, with_kwargs=True)

    result, workdir = train_here(job(**QUICK, training={"steps": 2}), plant=fragile)
    assert result.step == 2
    records = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    (event,) = [r for r in records if r.get("kind") == "precision_not_measured"]
    assert "16 tokens are not enough" in event["message"]
    assert table_of(workdir)["rows"]["gemm_compute"]["layers"] == []
    assert table_of(workdir)["rows"]["weights"]["bytes"] > 0


@pytest.mark.parametrize(("multiple", "expected"), [(16, 1), (32, 2)])
def test_the_probe_has_as_many_tokens_as_the_engine_takes(multiple: int, expected: int) -> None:
    assert _rows({"a": torch.nn.Linear(8, 64)}, {}, multiple) == expected
    # 32 tokens in two rows could be taken for the features of this one, as could 2.
    crowded = {"a": torch.nn.Linear(16, 32)}
    rows = _rows(crowded, {}, multiple)
    assert rows > expected
    assert rows * 16 % multiple == 0
