"""SwiGLU cast to FP8 in one kernel, beside Transformer Engine's kernels for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((8, 9), (9, 0)),
        reason="needs a GPU that these kernels are for",
    ),
]

FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return 2 * torch.randn(shape, generator=generator, device="cuda").bfloat16()


def quantizer(kind: str, scale: float, *, both: bool) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scales = torch.tensor([scale], device="cuda"), torch.zeros(1, device="cuda")
    made = Float8Quantizer(*scales, getattr(tex.DType, kind), rowwise=True, columnwise=both)
    made.internal = True
    return made


def assert_alike(own: Any, other: Any, kind: str, steps: float) -> None:
    """Their values; ``steps``: a step of the format, relative, by which a few may differ."""
    assert torch.equal(own._scale_inv, other._scale_inv)
    values, others = (t._data.view(FORMATS[kind]).float() for t in (own, other))
    assert bool(values.isfinite().all())
    apart = float((values != others).float().mean())
    print(kind, tuple(values.shape), "values apart", apart)
    assert apart < 0.02
    least = {"kFloat8E4M3": 2.0**-9, "kFloat8E5M2": 2.0**-16}[kind]
    assert bool(((values - others).abs() <= others.abs() * steps + least).all())
    if own._transpose is not None:
        assert torch.equal(own._transpose, own._data.t())


@pytest.mark.parametrize("both", [False, True])
# The last two saturate.
@pytest.mark.parametrize("scale", [3.0, 500.0, 1e6])
@pytest.mark.parametrize(("rows", "inner"), [(256, 512), (80, 176)])
def test_both_passes_are_those_of_transformer_engine(
    rows: int, inner: int, scale: float, both: bool
) -> None:
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.module import layernorm_mlp

    from fp8core.fusion.te_activation import CAST_SWIGLU, add_cast_swiglu

    assert add_cast_swiglu()
    forward, _, backward = layernorm_mlp._act_func(CAST_SWIGLU, recipe.DelayedScaling())
    joined, gradient = drawn(0, rows, 2 * inner), drawn(1, rows, inner)

    found, expected = (quantizer("kFloat8E4M3", scale, both=both) for _ in range(2))
    assert_alike(forward(joined, found), tex.swiglu(joined, expected), "kFloat8E4M3", 1 / 8)
    torch.testing.assert_close(found.amax, expected.amax, rtol=1e-5, atol=0)

    found, expected = (quantizer("kFloat8E5M2", scale, both=both) for _ in range(2))
    of_bias, own = backward(gradient, joined, found)
    assert of_bias is None
    # Rounded to bf16 before the cast, which these kernels do not.
    other = expected(tex.dswiglu(gradient, joined, None))
    assert_alike(own, other, "kFloat8E5M2", 1 / 4)
    torch.testing.assert_close(found.amax, expected.amax, rtol=2**-8, atol=0)


def test_other_activations_and_recipes_are_left_to_transformer_engine() -> None:
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.module import layernorm_mlp

    from fp8core.fusion.te_activation import CAST_SWIGLU, add_cast_swiglu

    add_cast_swiglu()
    theirs = getattr(layernorm_mlp._act_func, CAST_SWIGLU)
    add_cast_swiglu()
    assert getattr(layernorm_mlp._act_func, CAST_SWIGLU) is theirs
    for wanted in (None, recipe.DelayedScaling(), recipe.Float8CurrentScaling()):
        for name in ("swiglu", "geglu", "gelu"):
            assert layernorm_mlp._act_func(name, wanted) == theirs(name, wanted)
    for wanted in (None, recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()):
        assert layernorm_mlp._act_func(CAST_SWIGLU, wanted) == theirs("swiglu", wanted)


def test_an_amax_only_grows_and_the_same_input_gives_the_same_bits() -> None:
    from fp8core.fusion.swiglu_fp8_kernel import swiglu_gradient_in_fp8, swiglu_in_fp8

    joined, gradient = drawn(0, 512, 1024), drawn(1, 512, 512)
    scale, amax = torch.tensor([2.0], device="cuda"), torch.tensor([1e6], device="cuda")
    runs = [
        (
            *swiglu_in_fp8(joined, scale, amax, torch.float8_e4m3fn, both=True),
            *swiglu_gradient_in_fp8(gradient, joined, scale, amax, torch.float8_e5m2, both=True),
        )
        for _ in range(2)
    ]
    assert float(amax) == 1e6
    for first, again in zip(*runs, strict=True):
        assert torch.equal(first, again)
