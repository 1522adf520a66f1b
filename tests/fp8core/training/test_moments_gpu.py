"""Optimizer states of 8 bits on a GPU: the kernel beside the plain path that CPU tests cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.training import moments
from fp8core.training.optimizer import AdamW

pytestmark = pytest.mark.gpu
SHAPE = (300, 1001)  # the last block is not full


def stepped(
    dtype: torch.dtype, gradients: list[Tensor], *, master: bool, kernel: bool
) -> dict[str, Tensor]:
    """Weight and states after the steps, of which the third is held back."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    values = torch.randn(SHAPE, generator=generator, device="cuda")
    parameter = torch.nn.Parameter(values.to(dtype))
    optimizer = AdamW(
        [("weight", parameter)],
        decayed={"weight"},
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        state_dtype=torch.uint8,
        master_weights=master,
    )
    for number, gradient in enumerate(gradients):
        parameter.grad = gradient.to(dtype)
        unless = torch.tensor(float(number == 2), device="cuda")
        if number == 2:
            parameter.grad.fill_(torch.nan)
        if kernel:
            optimizer.step(unless=unless)
        else:
            optimizer._updates += 1
            random = torch.Generator(device="cuda").manual_seed(number)
            with torch.no_grad():
                group = optimizer.param_groups[0]
                optimizer._update_rounded(parameter, group, random, None, unless)
    return {**optimizer.state[parameter], "weight": parameter.detach()}


def drawn(count: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = torch.randn(SHAPE, generator=generator, device="cuda").exp()
    return [torch.randn(SHAPE, generator=generator, device="cuda") * size for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
)
def test_the_kernel_does_what_the_plain_path_does(dtype: torch.dtype, master: bool) -> None:
    gradients = drawn(5)
    plain, fused = (stepped(dtype, gradients, master=master, kernel=k) for k in (False, True))
    assert plain.keys() == fused.keys()
    assert float(plain["step"]) == float(fused["step"]) == 4
    values = [moments.read(found) for found in (plain, fused)]
    for key, spacing in (("exp_avg", 2**-3), ("exp_avg_sq", 2**-3)):
        own, other = (value[key] for value in values)
        # Each is rounded to one of its neighbours in every step.
        apart = (own - other).norm() / own.norm()
        print(dtype, master, key, float(apart))
        assert float(apart) < spacing
        bias = (other - own).mean() / own.abs().mean()
        assert abs(float(bias)) < 0.01
    # A block's exponent can only differ where its largest element is rounded up to a power of two.
    for key in ("exp_avg_exponents", "exp_avg_sq_exponents"):
        exponents = plain[key].int() - fused[key].int()
        assert int(exponents.abs().max()) <= 1
        assert float((exponents != 0).float().mean()) < 0.1
    for key in ("weight", *(["master"] if master else [])):
        own, other = plain[key].float(), fused[key].float()
        apart = (own - other).norm() / own.norm()
        print(dtype, master, key, float(apart))
        assert float(apart) < 0.01
        assert abs(float((own - other).mean())) < 1e-4


def test_a_held_back_step_keeps_every_bit_and_a_seed_gives_the_same_again() -> None:
    gradients = drawn(2)
    two = stepped(torch.bfloat16, gradients, master=False, kernel=True)
    held: Any = stepped(torch.bfloat16, [*gradients, gradients[0]], master=False, kernel=True)
    for key, value in two.items():
        assert torch.equal(held[key], value), key


def test_nothing_of_a_parameters_size_is_made_beside_it() -> None:
    parameter = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda").bfloat16())
    optimizer = AdamW(
        [("weight", parameter)],
        decayed=set(),
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        state_dtype=torch.uint8,
    )
    parameter.grad = torch.randn_like(parameter)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(unless=torch.zeros((), device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
