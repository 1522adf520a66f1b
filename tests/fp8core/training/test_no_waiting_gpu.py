"""From the second step on a run on a GPU waits for nothing: not for a batch, a figure or a record.

PyTorch raises here where the host waits for the device by a copy or by reading a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core import engines
from fp8core.data.batch import Batch
from fp8core.spec import parse_spec
from fp8core.telemetry import read_records
from fp8core.training.assemble import Assembled
from fp8core.training.learner import StepTotals
from fp8core.training.loop import TrainingLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

STEPS = 6
PARTS: dict[str, Any] = {
    "model": {
        "source": "config",
        "config": {
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attention_dropout": 0.0,
        },
    },
    "data": {"source": "builtin", "packing": True},
    "conversion": {"fuse": "auto", "small_gemm": "off"},
    "training": {"steps": STEPS, "sequence_length": 64, "gradient_accumulation": 2},
    "evaluation": {"every_steps": 0, "fraction": 0.0},
    "checkpoint": {"every_steps": 0, "keep_best": 0, "final": False},
    "telemetry": {"log_every_steps": 1, "fp8_every_steps": 0},
    "resources": {"device": "cuda"},
}


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("engine", ["amp", "te"])
def test_whole_steps_from_batch_to_record_wait_for_nothing(
    engine: str,
    job: Callable[..., Path],
    train_here: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = job(**PARTS, recipe={"engine": engine})
    found = engines.availability(parse_spec(spec.read_bytes()).recipe, torch.device("cuda"))
    if not found.ok:
        pytest.skip("; ".join(found.reasons))
    strict: list[int] = []
    in_pinned_memory: list[bool] = []
    fused: list[bool] = []

    def plant(assembled: Assembled) -> None:
        fusion = assembled.conversion.fusion
        fused.append(fusion is not None and fusion.whole)
        learner = assembled.learner
        count, compute = learner.totals, learner.gradients

        def totals(step: int, batches: list[Batch]) -> StepTotals:
            # The first step compiles kernels, and measures what the precision table says.
            if step > 1:
                torch.cuda.set_sync_debug_mode("error")
            return count(step, batches)

        def gradients(step: int, batches: list[Batch], **options: Any) -> Tensor:
            if torch.cuda.get_sync_debug_mode() == 2:
                strict.append(step)
            for batch in batches:
                assert batch.document_bounds is not None
                for tensor in (batch.input_ids, batch.labels, batch.document_bounds):
                    in_pinned_memory.append(tensor.is_pinned())
            return compute(step, batches, **options)

        learner.totals = totals  # type: ignore[assignment,method-assign]
        learner.gradients = gradients  # type: ignore[assignment,method-assign]

    train = TrainingLoop.run

    def run(loop: TrainingLoop) -> Any:
        # What follows the last step, such as the report, may wait.
        try:
            return train(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainingLoop, "run", run)
    _, workdir = train_here(spec, plant=plant)
    assert fused == [True]
    assert strict == list(range(2, STEPS + 1))
    assert len(in_pinned_memory) == 3 * 2 * STEPS
    assert all(in_pinned_memory)
    records = [record for record, _ in read_records(workdir / "telemetry.jsonl")]
    logged = [
        record["step"]
        for record in records
        if record["type"] == "metrics" and "train/loss" in record["values"]
    ]
    assert logged == list(range(1, STEPS + 1))


def test_a_wait_would_be_raised() -> None:
    number = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        number.item()
