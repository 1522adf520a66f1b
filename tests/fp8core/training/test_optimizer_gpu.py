"""The kernel of `AdamW` beside the plain path, which CPU tests hold to the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.training.optimizer import AdamW, global_norm
from tests.fp8core.kernel_names import launched, launches

pytestmark = pytest.mark.gpu

# Several launches' worth of programs; a vector; extents that no 16 bytes divide.
SHAPES = {"wide": (300, 1024), "vector": (64,), "odd": (77, 131), "one": (1,)}
STEPS, HELD_BACK = 4, 2
FACTOR = 0.3

FORMATS: list[tuple[torch.dtype, torch.dtype, bool]] = [
    (torch.bfloat16, torch.bfloat16, False),
    (torch.bfloat16, torch.float32, True),
    (torch.float32, torch.float32, False),
    (torch.float32, torch.bfloat16, False),
]


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for name, shape in SHAPES.items()
    }


def stepped(
    dtype: torch.dtype, states: torch.dtype, *, master: bool, kernel: bool
) -> dict[str, Tensor]:
    """Weights and states after the steps, of which one with gradients of NaN is held back."""
    parameters = {name: nn.Parameter(value) for name, value in drawn(0, dtype).items()}
    optimizer = AdamW(
        parameters.items(),
        decayed={"wide", "odd"},
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        state_dtype=states,
        master_weights=master,
    )
    factor = torch.tensor(FACTOR, device="cuda")
    for number in range(STEPS):
        unless = torch.tensor(float(number == HELD_BACK), device="cuda")
        for name, gradient in drawn(number + 1, dtype).items():
            filled = gradient.fill_(torch.nan) if number == HELD_BACK else gradient
            parameters[name].grad = filled
        if kernel:
            optimizer.step(factor=factor, unless=unless)
            continue
        optimizer._updates += 1
        random = torch.Generator(device="cuda").manual_seed(number)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer._update_rounded(parameter, group, random, factor, unless)
    weights = {f"{name}/weight": p.detach() for name, p in parameters.items()}
    return {**optimizer.state_tensors(), **weights}


@pytest.mark.parametrize(("dtype", "states", "master"), FORMATS)
def test_the_kernel_does_what_the_plain_path_does(
    dtype: torch.dtype, states: torch.dtype, master: bool
) -> None:
    plain, kernel = (stepped(dtype, states, master=master, kernel=k) for k in (False, True))
    assert plain.keys() == kernel.keys()
    assert float(kernel["wide/step"]) == STEPS - 1
    rounded = torch.bfloat16 in (dtype, states) and not master
    for key, own in plain.items():
        apart = float((own.float() - kernel[key].float()).norm() / own.float().norm())
        print(dtype, states, master, key, apart)
        if own.dtype == torch.float32:
            # A weight in fp32 follows moments that were rounded to either side.
            assert apart < (1e-3 if rounded else 1e-5), key
        elif own.dtype == torch.bfloat16:
            assert apart < 0.01, key
    if dtype == torch.bfloat16 and not master:
        # Rounded to either side: on average nothing is lost.
        bias = (kernel["wide/weight"].float() - plain["wide/weight"].float()).mean()
        assert abs(float(bias)) < 1e-5


def test_the_bits_follow_from_the_seed_and_from_nothing_else() -> None:
    first, second = (
        stepped(torch.bfloat16, torch.bfloat16, master=False, kernel=True) for _ in range(2)
    )
    for key, own in first.items():
        assert torch.equal(own, second[key]), key


def test_a_step_of_many_parameters_is_few_launches() -> None:
    parameters: dict[str, Any] = {
        str(number): nn.Parameter(torch.zeros(32, 64, device="cuda", dtype=torch.bfloat16))
        for number in range(50)
    }
    optimizer = AdamW(
        parameters.items(),
        decayed=set(parameters),
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        state_dtype=torch.bfloat16,
    )
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert launched(optimizer.step).count("_step") == 1


@pytest.mark.parametrize("odd", [False, True])
def test_the_norm_of_gradients_is_one_launch_and_the_same_each_time(odd: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    gradients = [draw(300, 1024).bfloat16(), draw(64).bfloat16(), 1e-3 * draw(4096, 512)]
    if odd:
        gradients += [draw(77, 131).bfloat16(), draw(1), draw(0)]
    exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    first, again = global_norm(gradients), global_norm(gradients)
    assert float(first) == pytest.approx(float(exact), rel=1e-6)
    assert torch.equal(first, again)
    names = launched(lambda: global_norm(gradients))
    assert launches(names, "_square") == 2, names  # one for each format

    gradients[0][7, 7] = torch.inf
    assert not bool(torch.isfinite(global_norm(gradients)))
