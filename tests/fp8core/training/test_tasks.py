"""Losses and figures of the tasks against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.data.batch import Batch
from fp8core.training.tasks import create_task


def batch_of(labels: list[Any], causal: bool = True) -> Batch:
    tensor = torch.tensor(labels)
    ids = torch.zeros(tensor.shape if tensor.ndim == 2 else (len(labels), 2), dtype=torch.int64)
    return Batch(
        input_ids=ids,
        labels=tensor,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=ids,
        document_ids=ids.int(),
        token_count=ids.numel(),
        target_count=int((tensor != -100).sum()),
        causal=causal,
    )


def logits_for(probabilities: list[Any]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_causal_loss_is_about_the_next_token() -> None:
    task = create_task("causal_lm")
    batch = batch_of([[-100, 1, -100, 0]])
    logits = logits_for([[[0.5, 0.5], [0.9, 0.1], [0.25, 0.75], [0.1, 0.9]]])
    # Position 0 predicts token 1 (label 1), position 2 predicts token 3 (label 0).
    assert task.target_count(batch) == 2
    wanted = -math.log(0.5) - math.log(0.25)
    assert float(task.loss_sum(logits, batch)) == pytest.approx(wanted, rel=1e-6)
    task.reset()
    task.add(logits, batch)
    figures = task.figures(text_bytes=6)
    assert figures["eval/loss"] == pytest.approx(wanted / 2, rel=1e-6)
    assert figures["eval/bits_per_byte"] == pytest.approx(3.0 / 6, rel=1e-6)  # 1 bit and 2 bits


def test_the_loss_of_bf16_logits_is_taken_in_fp32() -> None:
    task = create_task("causal_lm")
    logits = torch.randn(1, 16, 64).bfloat16()
    batch = batch_of([list(range(16))])
    wanted = torch.nn.functional.cross_entropy(
        logits[0, :-1].double(), batch.labels[0, 1:], reduction="sum"
    )
    loss = task.loss_sum(logits, batch)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)


def test_masked_loss_is_about_the_token_itself() -> None:
    task = create_task("masked_lm")
    batch = batch_of([[-100, 1, -100, 0]], causal=False)
    logits = logits_for([[[0.5, 0.5], [0.9, 0.1], [0.25, 0.75], [0.1, 0.9]]])
    wanted = -math.log(0.1) - math.log(0.1)
    assert float(task.loss_sum(logits, batch)) == pytest.approx(wanted, rel=1e-6)
    task.reset()
    task.add(logits, batch)
    assert set(task.figures(text_bytes=0)) == {"eval/loss"}


def test_accuracy_and_macro_f1() -> None:
    task = create_task("sequence_classification", class_count=4)
    task.reset()
    for labels, predictions in (([0, 0, 1], [0, 1, 1]), ([1, 2], [1, 0])):
        logits = torch.nn.functional.one_hot(torch.tensor(predictions), 4).float()
        task.add(logits, batch_of(labels, causal=False))
    figures = task.figures(None)
    assert figures["eval/accuracy"] == pytest.approx(3 / 5)
    # Class 0: tp 1, fp 1, fn 1; class 1: tp 2, fp 1, fn 0; class 2: fn 1; class 3 never occurs.
    assert figures["eval/macro_f1"] == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)


def test_an_evaluation_without_targets_has_no_figures() -> None:
    task = create_task("causal_lm")
    task.reset()
    task.add(torch.zeros(1, 4, 8), batch_of([[-100] * 4]))
    assert task.figures(10) == {}


TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "masked_lm": ({}, "BertForMaskedLM"),
    "sequence_classification": (
        {"data": {"format": "labelled"}},
        "BertForSequenceClassification",
    ),
}


@pytest.mark.parametrize("recipe", [{"engine": "amp", "dtype": "fp32"}, {"engine": "emulated"}])
@pytest.mark.parametrize("task", TASKS)
def test_encoders_learn_their_tasks(
    job: Callable[..., Path],
    train: Callable[..., Path],
    series: Callable[[Path, str], dict[int, float]],
    result: Callable[[Path], dict[str, Any]],
    task: str,
    recipe: dict[str, Any],
) -> None:
    import json

    spec = job()
    lines = [
        {"text": ("red green blue " if i % 2 else "one two three four ") * 3, "label": "ab"[i % 2]}
        for i in range(64)
    ]
    spec.with_name("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts, kind = TASKS[task]
    data = {"source": "jsonl", "path": "data.jsonl", **parts.get("data", {})}
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    path = job(task=task, recipe=recipe)
    whole = json.loads(path.read_bytes())
    whole["model"] = {"source": "config", "config": config}
    whole["data"] = data
    whole["training"] = {
        "steps": 40,
        "batch_size": 8,
        "sequence_length": 64,
        "optimizer": {"lr": 3e-3},
        "schedule": {"name": "constant"},
    }
    whole["evaluation"] = {"every_steps": 20, "fraction": 0.25}
    path.write_text(json.dumps(whole))
    workdir = train(path)
    assert result(workdir)["outcome"] == "succeeded", result(workdir)["detail"]
    losses = series(workdir, "eval/loss")
    if task == "masked_lm":
        assert losses[40] < 0.7 * math.log(272)
        assert series(workdir, "eval/bits_per_byte") == {}
    else:
        assert series(workdir, "eval/accuracy")[40] == 1.0
        assert series(workdir, "eval/macro_f1")[40] == 1.0
    assert json.loads((workdir / "report.json").read_bytes())["model"]["class"] == kind
