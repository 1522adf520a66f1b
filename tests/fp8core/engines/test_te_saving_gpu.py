"""What Transformer Engine's layers keep for their backward pass, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8core.engines.te_modules import make_linear
from fp8core.engines.weight_casts import WeightCasts

pytestmark = pytest.mark.gpu
WIDTH, TOKENS = 2048, 64


def run(layer: nn.Module, recipe: object) -> tuple[list[Tensor], int]:
    """Output and gradients of two steps, and the bytes that the second kept for its backward."""
    import transformer_engine.pytorch as te

    found: list[Tensor] = []
    kept = 0
    for seed in range(2):
        x = torch.randn(
            TOKENS,
            WIDTH,
            device="cuda",
            dtype=torch.bfloat16,
            generator=torch.Generator(device="cuda").manual_seed(seed),
        ).requires_grad_()
        layer.zero_grad()
        before = torch.cuda.memory_allocated()
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        kept = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad, next(layer.parameters()).grad.clone()]  # type: ignore[union-attr]
    return found, kept


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_weight_is_kept_in_one_order_with_the_same_numbers(scaling: str) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    plain = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
    results = []
    for own in (False, True):
        FP8GlobalStateManager.reset()
        recipe = DelayedScaling() if scaling == "delayed" else Float8CurrentScaling()
        if own:
            layer = make_linear(plain, "layer", WeightCasts())
        else:
            layer = te.Linear(
                WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cuda", name="layer"
            )
            layer.weight = plain.weight
        results.append(run(layer, recipe))
    FP8GlobalStateManager.reset()
    (theirs, theirs_kept), (ours, ours_kept) = results
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one, other)
    weight = WIDTH * WIDTH
    print(theirs_kept / weight, ours_kept / weight)
    assert theirs_kept - ours_kept == pytest.approx(weight, rel=0.01)
