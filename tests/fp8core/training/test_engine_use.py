"""What the loop tells an engine, and what it makes of an engine's FP8 health."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8core.engines import create
from fp8core.engines.emulated import EmulatedEngine
from fp8core.spec import parse_spec
from fp8core.telemetry import TelemetryWriter, read_records
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from fp8core.training.build import Places
from fp8core.training.fp8_health import FP8Health
from fp8core.training.run import Run
from fp8core.training.stopping import StopRequest
from fp8core.training.workdir import Workdir

Job = Callable[..., Path]


@pytest.fixture
def run_here(tmp_path: Path) -> Callable[[Path], None]:
    """Trains a spec in this process."""

    def run(path: Path) -> None:
        spec = parse_spec(json.loads(path.read_text()))
        with (
            Workdir(tmp_path / "work") as workdir,
            TelemetryWriter(workdir.telemetry) as telemetry,
        ):
            places = Places(base=tmp_path)
            Run(spec, workdir, telemetry, StopRequest(), places=places, device="cpu").execute()

    return run


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"gradient_accumulation": 3}, [True, False, False]),
        ({"gradient_accumulation": 1}, [None]),
        ({"gradient_accumulation": 3, "gradient_checkpointing": True}, [None] * 3),
    ],
)
def test_the_engine_learns_which_micro_batch_it_is(
    job: Job,
    run_here: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    told: list[bool | None],
) -> None:
    heard: list[bool | None] = []
    prepared: list[nn.Module] = []
    enter = EmulatedEngine.training_context

    def listen(engine: EmulatedEngine, first_microbatch: bool | None = None) -> Any:
        heard.append(first_microbatch)
        return enter(engine, first_microbatch)

    monkeypatch.setattr(EmulatedEngine, "training_context", listen)
    monkeypatch.setattr(EmulatedEngine, "prepare", lambda engine, model: prepared.append(model))
    run_here(job(training={"steps": 2, **training}))
    # The first is the micro-batch on which the precision table is measured.
    assert heard == [None, *told * 2]
    assert len(prepared) == 1


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_job_trains_with_torchao(
    job: Job,
    train: Callable[..., Path],
    series: Callable[[Path, str], dict[int, float]],
    result: Callable[[Path], dict[str, Any]],
    scaling: str,
) -> None:
    recipe = {"engine": "torchao", "scaling": scaling}
    parts: dict[str, Any] = {
        "training": {"steps": 12, "optimizer": {"name": "adamw", "lr": 5e-3}},
        "telemetry": {"fp8_every_steps": 4},
    }
    workdir = train(job(recipe=recipe, **parts))
    assert result(workdir)["outcome"] == "succeeded", result(workdir)
    losses = series(workdir, "train/loss")
    assert losses[12] < losses[1] - 0.3
    assert set(series(workdir, "fp8/model.layers.1.mlp.up_proj/grad_output/amax")) == {4, 8, 12}
    plain = series(train(job(recipe={"engine": "amp"}, **parts)), "eval/loss")
    for step, loss in series(workdir, "eval/loss").items():
        assert loss == pytest.approx(plain[step], abs=0.05)
        assert loss != plain[step]


def test_an_engines_checkpoint_function_is_put_where_transformers_calls_it() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).train()
    engine = create(spec_for().recipe, "cpu")
    blocks = 0

    def recompute(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        nonlocal blocks
        blocks += 1
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    engine.checkpoint_function = lambda: recompute  # type: ignore[method-assign]
    enable_gradient_checkpointing(model, engine)
    model(torch.ones(1, 16, dtype=torch.long)).logits.sum().backward()
    assert blocks == 2


def spec_for(**recipe: Any) -> Any:
    return parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "emulated", **recipe},
            "telemetry": {"fp8_every_steps": 2},
        }
    )


def recorded(path: Path, history: int, plant: Callable[[int, torch.Tensor], None]) -> list[Any]:
    """The records of eight steps of one layer, whose inputs ``plant`` may change."""
    spec = spec_for(amax_history_len=history)
    engine = create(spec.recipe, "cpu")
    torch.manual_seed(0)
    layer = engine.convert_linear(nn.Linear(16, 16), "block.up")
    with TelemetryWriter(path) as telemetry:
        health = FP8Health(spec, engine, telemetry)
        for step in range(1, 9):
            input = torch.randn(16, 16)
            plant(step, input)
            if health.is_due(step):
                health.begin()
            with engine.training_context():
                output = layer(input)
            output.backward(torch.ones_like(output))
            engine.after_backward()
            if health.is_due(step):
                health.end(step)
    return [record for record, _ in read_records(path)]


def test_alarms_become_events_with_layer_tensor_and_step(tmp_path: Path) -> None:
    def plant(step: int, input: torch.Tensor) -> None:
        if step == 3:
            input[0, 0] = float("inf")  # at a step that is not recorded
        if step == 6:
            input.mul_(1000.0)

    records = recorded(tmp_path / "telemetry.jsonl", 4, plant)
    assert [r["step"] for r in records if r["type"] == "metrics"] == [2, 4, 6, 8]
    events = [record for record in records if record["type"] == "event"]
    assert {event["kind"] for event in events} == {"fp8_alarm"}
    seen = [
        tuple(event["data"][key] for key in ("step", "what", "layer", "tensor")) for event in events
    ]
    assert seen == [
        (4, "infinite_amax", "block.up", "input"),
        (6, "saturation", "block.up", "input"),
    ]
    assert events[0]["message"].startswith("step 4: block.up input: 1 of the last 4 amaxes")


def test_a_scale_that_an_infinity_holds_is_an_alarm_of_its_own(tmp_path: Path) -> None:
    """An amax beyond its range, recorded while it is held, tells that it had to change."""

    def plant(step: int, input: torch.Tensor) -> None:
        if step == 3:
            input[0, 0] = float("inf")
        if step == 4:
            input[0, 0] = 1000.0  # one of 256: no saturation to speak of

    records = recorded(tmp_path / "telemetry.jsonl", 8, plant)
    events = [record for record in records if record["type"] == "event"]
    seen = [(event["data"]["step"], event["data"]["what"]) for event in events]
    assert seen == [(4, "infinite_amax"), (6, "frozen_scale")]
    assert (events[1]["data"]["layer"], events[1]["data"]["tensor"]) == ("block.up", "input")
    assert "2 updates after an amax of 1000 exceeded" in events[1]["message"]
