"""Which jobs may have graphs, and when one is captured, held and left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.conversion import ConversionReport
from fp8core.data.batch import Batch
from fp8core.engines.amp import AmpEngine
from fp8core.fusion import ModelFusion, fuse
from fp8core.fusion.plain import PlainParts
from fp8core.numerics.landing import Landing
from fp8core.spec import AmpRecipe, JobSpec, parse_spec
from fp8core.spec.step_graphs import graph_refusal as of_spec
from fp8core.training import step_graphs
from fp8core.training.late_metrics import LateMetrics
from fp8core.training.learner import Learner
from fp8core.training.optimizer import AdamW
from fp8core.training.step_graphs import StepGraphs
from fp8core.training.tasks import create_task
from tests.fp8core.fusion.berts import bert
from tests.fp8core.training.graphed import batch, graphs, learner
from tests.fp8core.training.tape import Tape, taped

__all__ = ["graphs", "learner"]  # fixtures


class _Silent:
    def event(self, kind: str, message: str, data: Any = None) -> None:
        assert kind == "step_graphed"


def by(graphs: StepGraphs, learner: Learner, step: int, given: Batch) -> bool:
    """Whether the gradients of ``given`` were replayed."""
    before = graphs.to_json()["replayed_steps"]
    totals = learner.totals(step, [given])
    graphs.gradients(step, [given], totals, with_health=False, before=lambda number: None)
    learner.drop_gradients()
    return bool(graphs.to_json()["replayed_steps"] > before)


def test_a_graph_is_captured_where_the_device_waits(
    graphs: list[StepGraphs], learner: Learner
) -> None:
    waited = 7
    own = StepGraphs(None, learner, _Silent(), lambda: waited, taped)  # type: ignore[arg-type]
    steps = iter(range(1, 1000))

    def replays(given: Batch) -> bool:
        return by(own, learner, next(steps), given)

    few, many, whole, short = batch(0, 3), batch(0, 40), batch(0, 1), batch(0, 3, length=32)
    assert not any(replays(few) for _ in range(9)), "the host was no limit"
    waited = 8
    assert replays(few)
    waited = 0
    assert [replays(whole) for _ in range(4)] == [False, False, False, True]
    assert replays(few)
    assert replays(many), "one with more room takes its place"
    assert not any(replays(short) for _ in range(6)), "two are held, and no more"
    assert replays(few)
    assert replays(whole)


def test_a_graph_is_held_until_one_with_more_room_is_captured(
    graphs: list[StepGraphs], learner: Learner
) -> None:
    """They share memory, into which PyTorch captures nothing once it has been without a graph."""
    made: list[weakref.ref[Tape]] = []
    held: list[int] = []

    def watched(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        held.append(sum(tape() is not None for tape in made))
        tape = Tape()
        made.append(weakref.ref(tape))
        with tape:
            result = compute()
        return tape.replay, result

    own = StepGraphs(None, learner, _Silent(), lambda: 99, watched)  # type: ignore[arg-type]
    few, many = batch(0, 3), batch(0, 40)
    assert [by(own, learner, step, few) for step in range(1, 5)] == [False, False, False, True]
    assert by(own, learner, 5, many)
    gc.collect()
    assert held == [0, 1]
    assert [tape() is None for tape in made] == [True, False]
    assert by(own, learner, 6, few)


def test_where_memory_is_short_for_one_more_graph_the_others_are_kept(
    graphs: list[StepGraphs], learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = StepGraphs(None, learner, _Silent(), lambda: 99, taped)  # type: ignore[arg-type]
    few, whole, many = batch(0, 3), batch(0, 1), batch(0, 40)
    assert [by(own, learner, step, few) for step in range(1, 5)] == [False, False, False, True]
    monkeypatch.setattr(step_graphs, "_has_memory", lambda device: False)
    assert not any(by(own, learner, step, whole) for step in range(5, 11))
    assert not by(own, learner, 11, many)
    assert by(own, learner, 12, few)
    assert own.refusal is None


def spec_of(**parts: Any) -> JobSpec:
    spec = {
        "model": {"source": "config", "config": {"model_type": "llama"}},
        "data": {"source": "builtin"},
        "recipe": {"engine": "te"},
    }
    return parse_spec(spec | parts)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, None),
        ({"recipe": {"engine": "amp", "dtype": "bf16"}}, None),
        ({"recipe": {"engine": "te", "scaling": "current"}}, None),
        ({"recipe": {"engine": "amp", "dtype": "fp16"}}, "steps in fp16"),
        ({"recipe": {"engine": "torchao"}}, "steps with torchao"),
        ({"recipe": {"engine": "te", "scaling": "block"}}, None),
        ({"recipe": {"engine": "te", "fp8_dpa": True}}, "attention in FP8"),
        (
            {"recipe": {"engine": "te", "override_linear_precision": [False, False, True]}},
            "override_linear_precision",
        ),
        (
            {
                "recipe": {
                    "engine": "te",
                    "scaling": "block",
                    "backward_override": "dequantized",
                }
            },
            "steps with backward_override",
        ),
        ({"recipe": {"engine": "te", "scaling": "mxfp8"}}, "steps with scaling mxfp8"),
        ({"recipe": {"engine": "te", "interval": 2}}, "recipe.interval"),
        ({"training": {"cuda_graphs": "off"}}, "training.cuda_graphs is off"),
        ({"training": {"gradient_accumulation": 2}}, "training.gradient_accumulation"),
        ({"training": {"gradient_checkpointing": True}}, "training.gradient_checkpointing"),
        ({"training": {"on_divergence": "skip_step"}}, "training.on_divergence"),
        ({"resources": {"gpus": 2}}, "several ranks"),
        ({"adapter": {}}, "steps of adapters"),
        (
            {
                "task": "masked_lm",
                "model": {"source": "config", "config": {"model_type": "bert"}},
            },
            "steps of the task masked_lm",
        ),
    ],
)
def test_which_specs_may_have_graphs(parts: dict[str, Any], reason: str | None) -> None:
    found = of_spec(spec_of(**parts))
    assert found is None if reason is None else reason in str(found)


def test_why_a_run_that_may_have_graphs_has_none() -> None:
    spec = spec_of(recipe={"engine": "amp", "dtype": "bf16"})
    model = nn.Sequential(nn.Linear(4, 4))
    report = ConversionReport(model, [], fusion=ModelFusion())
    for device, reason in (
        ("cpu", "there are graphs on CUDA devices only"),
        ("cuda", "not all blocks are fused"),
    ):
        engine = AmpEngine(AmpRecipe(engine="amp", dtype="bf16"), torch.device(device))
        optimizer = AdamW(
            model.named_parameters(),
            decayed=set(),
            lr=1.0,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.0,
        )
        task = create_task("causal_lm")
        learner = Learner(spec.training, model, engine, optimizer, task)
        assert step_graphs.graph_refusal(spec, learner, report) == reason


def test_attention_that_looks_ahead_has_no_graphs() -> None:
    model = bert()
    report = ConversionReport(model, [], fusion=fuse(model, PlainParts(), {}))
    assert "looks ahead" in str(step_graphs._unfit(report))


def test_steps_that_the_device_waited_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateMetrics(late=True)
    loss = torch.zeros(())
    for step in range(1, 4):
        late.push(step, {"loss": loss}, {})
    assert late.waited_for_host == 2  # of the first nothing was asked
    monkeypatch.setattr(Landing, "arrived", property(lambda self: False))
    late.push(4, {"loss": loss}, {})
    assert late.waited_for_host == 0
