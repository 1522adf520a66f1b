"""The baselines: dtypes, the loss scale and its skipped steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8core.engines import NormDescription, create
from fp8core.engines.protocol import Engine
from fp8core.spec.recipe import AmpRecipe


def engine_for(dtype: str, **fields: float) -> Engine:
    return create(AmpRecipe(engine="amp", dtype=dtype, **fields), "cpu")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_activations_have_the_dtype(dtype: str, expected: torch.dtype) -> None:
    engine = engine_for(dtype)
    assert engine.compute_dtype == expected
    layer = nn.Linear(16, 16)
    for context in (engine.training_context(), engine.evaluation_context()):
        with context:
            assert layer(torch.randn(16, 16)).dtype == expected
    assert layer(torch.randn(16, 16)).dtype == torch.float32


def test_fp32_is_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    layer, input = nn.Linear(16, 16), torch.randn(16, 16)
    with engine_for("fp32").training_context():
        assert torch.equal(layer(input), layer(input))
        inside = layer(input)
    assert torch.equal(inside, layer(input))


def test_nothing_is_converted() -> None:
    engine = engine_for("bf16")
    norm = NormDescription("layer_norm", (16,), 1e-5, None, None)
    assert engine.linear_refusal(nn.Linear(16, 16)) == "engine amp converts nothing"
    assert engine.norm_refusal(norm) == "engine amp converts nothing"
    with pytest.raises(TypeError, match="converts nothing"):
        engine.convert_linear(nn.Linear(16, 16), "layer")
    with pytest.raises(TypeError, match="converts nothing"):
        engine.convert_norm(norm, "norm")


def scaled_step(engine: Engine, layer: nn.Linear, factor: float = 1.0) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = engine.gradient_scaler
    assert scaler is not None
    with engine.training_context():
        loss = layer(torch.ones(16, 16)).float().mean() * factor
    scaler.scale(loss).backward()
    engine.after_backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_fp16_scales_the_loss_and_counts_skipped_steps() -> None:
    engine = engine_for("fp16", initial_loss_scale=1024.0, growth_interval=2)
    layer = nn.Linear(16, 16)
    assert engine.metrics() == {"amp/loss_scale": 1024.0, "amp/skipped_steps": 0.0}
    before = layer.weight.detach().clone()
    scaled_step(engine, layer)
    assert engine.metrics() == {"amp/loss_scale": 1024.0, "amp/skipped_steps": 0.0}
    # The gradient was unscaled: each weight's is 16 rows * 1/256, times the rate 0.1.
    torch.testing.assert_close(before - layer.weight, torch.full_like(before, 0.1 / 16))
    scaled_step(engine, layer)  # the second clean step: the scale doubles
    assert engine.metrics()["amp/loss_scale"] == 2048.0
    kept = layer.weight.detach().clone()
    scaled_step(engine, layer, factor=float("inf"))  # overflow: halved, nothing changes
    assert engine.metrics() == {"amp/loss_scale": 1024.0, "amp/skipped_steps": 1.0}
    assert torch.equal(kept, layer.weight)
    scaled_step(engine, layer)
    assert engine.metrics() == {"amp/loss_scale": 1024.0, "amp/skipped_steps": 1.0}
    assert not torch.equal(kept, layer.weight)


def test_fp16_state_goes_on_exactly() -> None:
    layer = nn.Linear(16, 16)
    first = engine_for("fp16", growth_interval=3)
    scaled_step(first, layer, factor=float("inf"))
    scaled_step(first, layer)
    scaled_step(first, layer)
    state = first.state_dict()
    second = engine_for("fp16", growth_interval=3)
    second.load_state_dict(state)
    assert second.metrics() == first.metrics()
    assert second.metrics()["amp/skipped_steps"] == 1.0
    scaled_step(second, layer)  # the third clean step in a row
    assert second.metrics()["amp/loss_scale"] == 65536.0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_others_have_no_state(dtype: str) -> None:
    engine = engine_for(dtype)
    assert engine.gradient_scaler is None
    assert engine.metrics() == engine.health() == engine.state_dict() == {}
    with pytest.raises(ValueError, match=r"amp\.loss_scale is not known here"):
        engine.load_state_dict(engine_for("fp16").state_dict())
