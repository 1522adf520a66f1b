"""The te engine over whole steps on a GPU: gradient checkpointing, and casts of weights kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8core.conversion import convert
from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.spec import Conversion, parse_spec
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from tests.fp8core.kernel_names import E4M3_BY_E4M3, launched, launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
LAYERS, LINEARS_PER_LAYER = 2, 7
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"scaling": "delayed", "amax_history_len": 4},
    "delayed, interval 2": {"scaling": "delayed", "amax_history_len": 4, "interval": 2},
    "current": {"scaling": "current"},
    "delayed, wgrad high": {
        "scaling": "delayed",
        "amax_history_len": 4,
        "override_linear_precision": [False, False, True],
    },
    "delayed, dgrad high": {
        "scaling": "delayed",
        "amax_history_len": 4,
        "override_linear_precision": [False, True, False],
    },
    "current, backward high": {
        "scaling": "current",
        "override_linear_precision": [False, True, True],
    },
}


def engine_for(**recipe: Any) -> TransformerEngine:
    spec = parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "te", **recipe},
        }
    )
    return TransformerEngine(spec.recipe, DEVICE)


def llama(engine: TransformerEngine, *, checkpointing: bool, **config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        # Its backward pass adds up in a fixed order, that of the fused ones does not.
        "attn_implementation": "eager",
    } | config
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(DEVICE).train()
    convert(model, engine, Conversion(fuse="none"))
    if checkpointing:
        enable_gradient_checkpointing(model, engine)
    engine.prepare(model)
    return model


def tokens(index: int, length: int = 64) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(index)
    return torch.randint(0, 256, (2, length), device=DEVICE, generator=generator)


def forward(
    engine: TransformerEngine, model: Any, ids: torch.Tensor, first: bool | None = None
) -> torch.Tensor:
    with engine.training_context(first):
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def train(
    engine: TransformerEngine, model: Any, steps: int, *, accumulation: int = 1, keep: bool = False
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for micro_batch in range(accumulation):
            first = micro_batch == 0 if keep else None
            loss = forward(engine, model, tokens((step * accumulation + micro_batch) % 2), first)
            loss.backward()
            engine.after_backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# Gradient checkpointing


@pytest.mark.parametrize("name", list(RECIPES))
def test_checkpointing_changes_neither_losses_nor_scales(name: str) -> None:
    losses, states = [], []
    for checkpointing in (False, True):
        engine = engine_for(**RECIPES[name])
        model = llama(engine, checkpointing=checkpointing)
        losses.append(train(engine, model, 5))
        states.append(engine.state_dict())
    assert losses[0] == losses[1]
    assert losses[0][4] < losses[0][0]  # both on the first batch
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_recomputation_runs_in_fp8(name: str) -> None:
    engine = engine_for(**RECIPES[name])
    model = llama(engine, checkpointing=True)
    train(engine, model, 2)
    loss = forward(engine, model, tokens(9))
    names = launched(loss.backward)
    engine.after_backward()
    # e4m3 x e4m3 is fprop: in a backward pass that is the recomputation.
    assert launches(names, E4M3_BY_E4M3) == LAYERS * LINEARS_PER_LAYER, names


@pytest.mark.parametrize("name", ["delayed", "delayed, wgrad high"])
def test_checkpointing_holds_less_memory(name: str) -> None:
    held = []
    for checkpointing in (False, True):
        engine = engine_for(**RECIPES[name])
        model = llama(engine, checkpointing=checkpointing, num_hidden_layers=6)
        ids = tokens(0, length=1024)
        forward(engine, model, ids).backward()
        engine.after_backward()
        before = torch.cuda.memory_allocated()
        loss = forward(engine, model, ids)
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        engine.after_backward()
        del loss, model, engine
    assert held[1] < held[0] / 2, held


def test_health_is_the_same_under_checkpointing() -> None:
    figures = []
    for checkpointing in (False, True):
        engine = engine_for(**RECIPES["delayed"])
        model = llama(engine, checkpointing=checkpointing)
        train(engine, model, 2)
        engine.record_health(True)
        forward(engine, model, tokens(5)).backward()
        engine.after_backward()
        figures.append(engine.health())
    assert figures[0] == figures[1]
    assert "fp8/model.layers.1.mlp.down_proj/grad_output/underflow" in figures[0]


# Casts of weights kept between the micro-batches of a step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 256, bias=False)
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.repeat(1, 2) if self.skip else self.first(x)
        return self.second(torch.relu(hidden))  # type: ignore[no-any-return]


def net_for(engine: TransformerEngine) -> Net:
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    for name in ("first", "second"):
        setattr(net, name, engine.convert_linear(getattr(net, name), name))
    return net


def data(index: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(index)
    return torch.randn(64, 256, device=DEVICE, generator=generator, requires_grad=True)


def gradients(
    engine: TransformerEngine, net: Net, *, keep: bool, steps: int = 3, lr: float = 0.5
) -> list[torch.Tensor]:
    """Gradients of every step, three micro-batches each; the second step's first one skips a layer.

    Evaluations lie between the micro-batches.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    found = []
    for step in range(steps):
        for micro_batch in range(3):
            net.skip = step == 1 and micro_batch == 0
            with engine.training_context(micro_batch == 0 if keep else None):
                loss = net(data(3 * step + micro_batch)).float().square().mean()
            with torch.no_grad(), engine.evaluation_context():
                net(data(100))
            loss.backward()
            engine.after_backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("use_autocast_during_eval", [False, True])
def test_kept_casts_change_no_bit_with_current_scaling(use_autocast_during_eval: bool) -> None:
    recipe = {"scaling": "current", "use_autocast_during_eval": use_autocast_during_eval}
    found = []
    for keep in (False, True):
        engine = engine_for(**recipe)
        found.append(gradients(engine, net_for(engine), keep=keep))
    assert len(found[0]) == len(found[1]) == 9
    for plain, kept in zip(*found, strict=True):
        assert torch.equal(plain, kept)


def test_kept_casts_round_weights_with_the_scale_of_the_first_micro_batch() -> None:
    found, histories = [], []
    for keep in (False, True):
        engine = engine_for(scaling="delayed", amax_history_len=16)
        found.append(gradients(engine, net_for(engine), keep=keep, steps=4, lr=1e-3))
        histories.append(engine.state_dict()["second/forward/amax_history"])
    # Both round the same weights to 3 bits of mantissa, under scales that may differ: half a unit
    # in the last place is 2^-4, its root mean square a third of that, in fprop and in dgrad.
    for plain, kept in zip(*found, strict=True):
        error = (plain - kept).norm() / plain.norm()
        # One E4M3 rounding (2^-4 at most, half of it typically) apart in every weight; 0.107 seen.
        assert error < 0.15, error
    amaxes = [(history != 0).sum(dim=0).tolist() for history in histories]
    # (input, weight, output): a weight cast once a step is measured once a step.
    assert amaxes == [[12, 12, 0], [12, 4, 0]]


def test_an_interval_keeps_no_casts() -> None:
    engine = engine_for(scaling="delayed", amax_history_len=16, interval=2)
    gradients(engine, net_for(engine), keep=True, steps=4)
    history = engine.state_dict()["second/forward/amax_history"]
    assert (history != 0).sum(dim=0).tolist() == [12, 12, 0]


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_micro_batch_that_keeps_casts_launches_fewer_launched(scaling: str) -> None:
    counts = []
    for keep in (False, True):
        engine = engine_for(scaling=scaling)
        net = net_for(engine)

        def micro_batch(first: bool | None, engine: Any = engine, net: Any = net) -> None:
            with engine.training_context(first):
                loss = net(data(0)).float().square().mean()
            loss.backward()
            engine.after_backward()

        for first in (True, False, True):
            micro_batch(first if keep else None)
        names = launched(lambda: micro_batch(False if keep else None))  # noqa: B023
        counts.append(names)
    # Two weights, each cast by at least one kernel.
    assert len(counts[0]) - len(counts[1]) >= 2, counts
    casts = [sum("cast" in name or "quantize" in name for name in names) for names in counts]
    assert casts[0] - casts[1] >= 2, counts


def test_kept_casts_and_checkpointing_together_change_no_bit_with_current_scaling() -> None:
    losses = []
    for checkpointing, keep in ((False, False), (True, True)):
        engine = engine_for(scaling="current")
        model = llama(engine, checkpointing=checkpointing)
        losses.append(train(engine, model, 3, accumulation=2, keep=keep))
    assert losses[0] == losses[1]


def test_health_shows_the_scale_that_a_kept_cast_was_made_with() -> None:
    engine = engine_for(scaling="delayed", amax_history_len=1)
    net = net_for(engine)
    for step in range(2):
        with torch.no_grad():
            net.second.weight.mul_(2.0)
        for micro_batch in range(2):
            engine.record_health(step == 1 and micro_batch == 1)
            with engine.training_context(micro_batch == 0):
                loss = net(data(0)).float().square().mean()
            loss.backward()
            engine.after_backward()
    amax = net.second.weight.abs().max().item()
    figures = engine.health()
    assert figures["fp8/second/weight/amax"] == pytest.approx(amax)
    # The first micro-batch cast with the scale of the step before, whose weights were half as big.
    assert figures["fp8/second/weight/scale"] == pytest.approx(448.0 / (amax / 2), rel=1e-6)
    assert figures["fp8/second/weight/saturated"] > 0


def test_infinities_in_the_history_are_counted() -> None:
    for override in ([False] * 3, [False, False, True]):
        engine = engine_for(
            scaling="delayed", amax_history_len=4, override_linear_precision=override
        )
        net = net_for(engine)
        counts = []
        for step in range(5):
            x = data(step).detach()
            if step == 1:
                x[0, 0] = float("inf")
            engine.record_health(True)
            with engine.training_context():
                output = net.first(x)
            output.backward(torch.ones_like(output))
            engine.after_backward()
            counts.append(engine.health().get("fp8/first/input/infinities"))
        assert counts == [None, 1.0, 1.0, 1.0, None]
