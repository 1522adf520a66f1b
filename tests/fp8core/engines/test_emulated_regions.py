"""What runs in FP8 when: training, evaluation, recomputation, accumulation, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core.engines import NormDescription
from fp8core.engines.emulated import EmulatedEngine

Make = Callable[..., EmulatedEngine]


class Blocks(nn.Module):
    """A few residual blocks, each of which may be recomputed in the backward pass."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.reentrant: bool | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


def convert(model: nn.Module, engine: EmulatedEngine) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, engine.convert_linear(module, name))
    return model


def blocks(engine: EmulatedEngine, reentrant: bool | None = None) -> Blocks:
    torch.manual_seed(0)
    model = Blocks()
    model.reentrant = reentrant
    convert(model, engine)
    return model


def micro_batch(engine: EmulatedEngine, model: nn.Module, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(16, 32, generator=generator).requires_grad_()
    with engine.training_context():
        loss = model(input).float().square().mean()
    loss.backward()
    engine.after_backward()
    return loss.item()


def train(engine: EmulatedEngine, model: nn.Module, steps: range, accumulation: int = 1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        for part in range(accumulation):
            losses.append(micro_batch(engine, model, step * accumulation + part))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradient_checkpointing_changes_nothing(
    delayed: Make, reentrant: bool, accumulation: int
) -> None:
    # Scales move in every step, so a recomputation with other scales, in high precision, or one
    # that staged its amaxes again would give other losses, weights or histories.
    results = []
    for kind in (None, reentrant):
        engine = delayed(amax_history_len=3)
        model = blocks(engine, kind)
        losses = train(engine, model, range(4), accumulation)
        results.append((losses, model.state_dict(), engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert_equal_states(results[0][1], results[1][1])
    assert_equal_states(results[0][2], results[1][2])


def test_gradient_checkpointing_under_current_scaling(current: Make) -> None:
    results = []
    for kind in (None, False):
        engine = current()
        model = blocks(engine, kind)
        results.append((train(engine, model, range(3)), model.state_dict()))
    assert results[0][0] == results[1][0]
    assert_equal_states(results[0][1], results[1][1])


def test_backward_inside_the_context_recomputes_as_well(delayed: Make) -> None:
    results = []
    for kind in (None, False):
        engine = delayed(amax_history_len=3)
        model = blocks(engine, kind)
        losses = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            with engine.training_context():
                loss = model(torch.randn(16, 32, generator=generator)).float().square().mean()
                loss.backward()
            engine.after_backward()
            losses.append(loss.item())
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((losses, gradients, engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert_equal_states(results[0][1], results[1][1])
    assert_equal_states(results[0][2], results[1][2])


def test_a_recomputation_that_cannot_be_told_is_refused(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    model = blocks(engine, False)
    losses = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        with engine.training_context():
            losses.append(model(torch.randn(16, 32, generator=generator)).float().mean())
    with pytest.raises(RuntimeError, match="which of them to repeat is not known"):
        sum(losses).backward()


def test_two_forward_passes_before_one_backward_pass(delayed: Make) -> None:
    # Without recomputation that is unambiguous: each pass keeps what it cast.
    engine = delayed(amax_history_len=3)
    model = blocks(engine)
    losses = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        with engine.training_context():
            losses.append(model(torch.randn(16, 32, generator=generator)).float().mean())
    sum(losses).backward()
    engine.after_backward()
    assert all(p.grad is not None for p in model.parameters())


def test_transformers_gradient_checkpointing(delayed: Make) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
    )
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        engine = delayed(amax_history_len=3)
        model = convert(LlamaForCausalLM(config).train(), engine)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            with engine.training_context():
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            engine.after_backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, model.state_dict(), engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert_equal_states(results[0][1], results[1][1])
    assert_equal_states(results[0][2], results[1][2])


def test_evaluation_is_high_precision_and_leaves_no_trace(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    model = blocks(engine)
    train(engine, model, range(2))
    plain = Blocks()
    plain.load_state_dict(model.state_dict())
    input = torch.randn(16, 32)
    before = engine.state_dict()
    with torch.no_grad(), engine.evaluation_context():
        ours = model(input)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = plain(input)
    assert torch.equal(ours, theirs)
    assert_equal_states(before, engine.state_dict())
    # Outside every context: an ordinary fp32 model.
    assert torch.equal(model(input), plain(input))


def test_evaluation_in_fp8_uses_the_present_scales_and_leaves_no_trace(delayed: Make) -> None:
    engine = delayed(amax_history_len=3, use_autocast_during_eval=True)
    model = blocks(engine)
    train(engine, model, range(2))
    input = torch.randn(16, 32) * 50
    before = engine.state_dict()
    with torch.no_grad(), engine.evaluation_context():
        evaluated = model(input)
    assert_equal_states(before, engine.state_dict())
    with engine.training_context():
        trained = model(input)
    assert torch.equal(evaluated, trained)


def test_evaluation_between_steps_does_not_change_training(delayed: Make) -> None:
    results = []
    for evaluate in (False, True):
        engine = delayed(amax_history_len=3, use_autocast_during_eval=True)
        model = blocks(engine)
        losses = []
        for step in range(3):
            losses += train(engine, model, range(step, step + 1))
            if evaluate:
                with torch.no_grad(), engine.evaluation_context():
                    model(torch.full((16, 32), 1000.0))
        results.append((losses, engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert_equal_states(results[0][1], results[1][1])


def test_contexts_do_not_nest_and_recover_from_errors(delayed: Make) -> None:
    engine = delayed()
    outer, refused = engine.training_context(), pytest.raises(RuntimeError, match="do not nest")
    with outer, refused, engine.evaluation_context():
        pass
    with pytest.raises(ZeroDivisionError), engine.training_context():
        raise ZeroDivisionError
    with engine.training_context():
        pass
    assert not torch.is_autocast_enabled("cpu")


def test_a_resumed_run_equals_an_uninterrupted_one(delayed: Make) -> None:
    fields = {"amax_history_len": 5, "interval": 2}
    engine = delayed(**fields)
    model = blocks(engine)
    whole = train(engine, model, range(6))

    first = delayed(**fields)
    halted = blocks(first)
    losses = train(first, halted, range(3))
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(halted.state_dict())
    second = delayed(**fields)
    resumed = blocks(second)
    resumed.load_state_dict(weights)
    second.load_state_dict(state)
    assert_equal_states(state, second.state_dict())
    losses += train(second, resumed, range(3, 6))
    assert losses == whole
    assert_equal_states(engine.state_dict(), second.state_dict())
    assert_equal_states(model.state_dict(), resumed.state_dict())


def test_a_state_dict_is_a_copy(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    model = blocks(engine)
    state = engine.state_dict()
    kept = copy.deepcopy(state)
    train(engine, model, range(1))
    assert_equal_states(state, kept)


def test_a_foreign_state_is_refused_and_nothing_changes(delayed: Make) -> None:
    engine = delayed(amax_history_len=3)
    model = blocks(engine)
    train(engine, model, range(2))
    before = engine.state_dict()
    longer = delayed(amax_history_len=4)
    blocks(longer)
    with pytest.raises(ValueError, match=r"amax_history is float32 \[4, 3\] and should be"):
        engine.load_state_dict(longer.state_dict())
    missing = engine.state_dict()
    del missing["blocks.0.0.forward.scale"]
    with pytest.raises(ValueError, match=r"blocks\.0\.0\.forward\.scale is missing"):
        engine.load_state_dict(missing)
    with pytest.raises(ValueError, match="extra is not known here"):
        engine.load_state_dict(engine.state_dict() | {"extra": torch.ones(1)})
    halves = {name: tensor.bfloat16() for name, tensor in before.items()}
    with pytest.raises(ValueError, match="and 31 more"):  # 16 missing, 20 wrong; 5 shown
        engine.load_state_dict(dict(list(halves.items())[:20]))
    assert_equal_states(before, engine.state_dict())


def test_a_name_is_taken_once(delayed: Make) -> None:
    engine = delayed()
    engine.convert_linear(nn.Linear(16, 16), "layer")
    with pytest.raises(ValueError, match="already has a module named 'layer'"):
        engine.convert_linear(nn.Linear(16, 16), "layer")


def test_parameters_are_the_originals(delayed: Make) -> None:
    linear = nn.Linear(16, 32).eval()
    linear.weight.requires_grad_(False)
    layer = delayed().convert_linear(linear, "layer")
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert not layer.training
    without = delayed().convert_linear(nn.Linear(16, 32, bias=False), "layer")
    assert without.bias is None
    assert list(without.state_dict()) == ["weight"]


def test_what_a_linear_is_refused_for(delayed: Make) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    engine = delayed()
    assert engine.linear_refusal(nn.Linear(16, 48)) is None
    refused = [
        (nn.Linear(10, 16), "in_features 10 is not a multiple of 16"),
        (nn.Linear(16, 2), "out_features 2 is not a multiple of 16"),
        (nn.Linear(16, 16, dtype=torch.float64), "its weight is float64"),
        (Doubled(16, 16), "Doubled computes more than a Linear does"),
        (nn.MultiheadAttention(16, 2).out_proj, "its attention module reads the weight itself"),
        (
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "its weight is computed from other parameters",
        ),
    ]
    for linear, reason in refused:
        assert (engine.linear_refusal(linear) or "").startswith(reason)
    odd = NormDescription("rms_norm", (16,), 1e-6, nn.Parameter(torch.ones(8)), None)
    assert engine.norm_refusal(odd) == "its weight has shape [8], not [16]"
