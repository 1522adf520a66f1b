"""The kernel of `AdamW` on a GPU: one reading and one writing of every parameter and its states.

All parameters of the same formats are one launch, over a table of their addresses. Whatever is
stored in bf16 is rounded stochastically here too, with random bits that follow from a parameter's
seed and an element's place alone (Philox, Salmon et al., SC 2011, with 7 rounds): the same seed
gives the same weights, on any GPU and in whatever order blocks run. Imported where Triton is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Updated", "update"]

_BLOCK = 512
_WARPS = 4
# Four blocks make a program, as Philox gives four words of 32 bits at a time.
_PER_PROGRAM = tl.constexpr(4)
_LOADED_TOGETHER = 16  # bytes, and a multiple of it in elements

_EXPONENT = tl.constexpr(0x7F800000)
_LOWER = tl.constexpr(0xFFFF)
_MIX = tl.constexpr(0x9E3779B1)  # 2**32 divided by the golden ratio, and odd

_COLUMNS = tl.constexpr(9)


@dataclass(frozen=True)
class Updated:
    """A parameter, its gradient, its ``AdamW.state``, and the seed of its random bits.

    ``state``: ``exp_avg``, ``exp_avg_sq`` (bf16 or fp32), ``step`` (fp32, 0-dim; counts this step
    already) and perhaps ``master`` (fp32). All contiguous and on one device.
    """

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    seed: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Those of the parameter's size: weight, gradient, moments, what is updated in fp32."""
        state = self.state
        master = state.get("master", self.weight)
        return self.weight, self.gradient, state["exp_avg"], state["exp_avg_sq"], master


def update(
    parameters: Sequence[Updated],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None,
    unless: Tensor | None,
) -> None:
    """One step of ``parameters``, all on one device.

    ``factor``: what the gradients count with (fp32, 0-dim). Where ``unless`` is 1 no bit changes.
    """
    alike: dict[tuple[object, ...], list[Updated]] = {}
    for parameter in parameters:
        if parameter.weight.numel():
            formats = tuple(tensor.dtype for tensor in parameter.tensors)
            alike.setdefault((*formats, "master" in parameter.state), []).append(parameter)
    for some in alike.values():
        table, owners, aligned = _table(some)
        first = some[0].tensors
        _step[(owners.numel(),)](
            table,
            owners,
            # For their formats alone: what is read and written stands in the table.
            *first,
            some[0].state["step"] if factor is None else factor,
            some[0].state["step"] if unless is None else unless,
            lr,
            *betas,
            eps,
            weight_decay,
            HAS_MASTER="master" in some[0].state,
            HAS_FACTOR=factor is not None,
            HAS_UNLESS=unless is not None,
            ALIGNED=aligned,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def _table(parameters: Sequence[Updated]) -> tuple[Tensor, Tensor, bool]:
    """Addresses and extents by parameter, int64 [parameters, `_COLUMNS`]; the parameter that each
    program works at, int32 [programs]; and whether elements can be read 16 bytes at a time."""
    rows, begin, aligned = [], 0, True
    for parameter in parameters:
        elements = parameter.weight.numel()
        places = [tensor.data_ptr() for tensor in parameter.tensors]
        aligned &= not any(number % _LOADED_TOGETHER for number in (*places, elements))
        step = parameter.state["step"].data_ptr()
        rows.append([*places, step, elements, begin, parameter.seed])
        begin += triton.cdiv(elements, _BLOCK * _PER_PROGRAM.value)
    device = parameters[0].weight.device
    owners = _owners(tuple(row[6] for row in rows), _BLOCK, device)
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True), owners, aligned


@functools.lru_cache(maxsize=16)
def _owners(extents: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    programs = torch.tensor([triton.cdiv(n, block * _PER_PROGRAM.value) for n in extents])
    numbers = torch.arange(len(extents), dtype=torch.int32)
    return numbers.repeat_interleave(programs).to(device)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded(value, bits, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 as ``KIND``; as bf16 with 16 random bits added below its last one, then cut off."""
    if tl.bfloat16 == KIND:
        own = value.to(tl.int32, bitcast=True)
        finite = (own & _EXPONENT) != _EXPONENT
        own = tl.where(finite, own + bits, own)
        return (own >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(KIND)


@triton.jit
def _one_less_power(beta, count):  # type: ignore[no-untyped-def]
    """``1 - beta ** count`` of a beta near 1, without what cancels out in the first steps."""
    x = count * tl.log(beta)
    near = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.1, near, 1.0 - tl.exp(x))


@triton.jit  # type: ignore[untyped-decorator]
def _at(address, kind, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pointer that a table holds as a number, with the type of the pointer ``kind``."""
    pointer = address.to(kind.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


_PER_STEP = ["lr", "beta1", "beta2", "eps", "weight_decay"]


@triton.jit(do_not_specialize=_PER_STEP)  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    table,
    owners,
    of_weights,
    of_gradients,
    of_exp_avg,
    of_exp_avg_sq,
    of_masters,
    factor,
    unless,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    HAS_MASTER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_UNLESS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * _COLUMNS
    weight = _at(tl.load(row), of_weights, ALIGNED)
    gradient = _at(tl.load(row + 1), of_gradients, ALIGNED)
    exp_avg = _at(tl.load(row + 2), of_exp_avg, ALIGNED)
    exp_avg_sq = _at(tl.load(row + 3), of_exp_avg_sq, ALIGNED)
    master = _at(tl.load(row + 4), of_masters, ALIGNED)
    count = tl.load(tl.load(row + 5).to(factor.dtype))
    elements = tl.load(row + 6)
    if HAS_UNLESS:
        elements = tl.where(tl.load(unless) == 0, elements, 0)
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
    block = program - tl.load(row + 7)
    seed = tl.load(row + 8)

    rate = lr / _one_less_power(beta1, count)
    scale = 1.0 / tl.sqrt(_one_less_power(beta2, count))
    kept = 1.0 - lr * weight_decay
    kind = of_weights.dtype.element_ty
    moments = of_exp_avg.dtype.element_ty
    within = tl.arange(0, BLOCK)
    words = tl.randint4x(seed, (block * BLOCK).to(tl.uint32) + within.to(tl.uint32), n_rounds=7)

    for part in tl.static_range(_PER_PROGRAM):
        places = (block * _PER_PROGRAM + part) * BLOCK + within
        inside = places < elements
        g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            g = g * tl.load(factor)
        m = tl.load(exp_avg + places, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + places, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(master + places, mask=inside, other=0.0).to(tl.float32)

        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        w = kept * w - rate * m / (tl.sqrt(v) * scale + eps)

        # Three times 16 bits of each word: its halves, and those that a product spreads over. Any
        # two of the three are as good as independent.
        word = words[part]
        first = word.to(tl.int32, bitcast=True)
        third = (word * _MIX).to(tl.int32, bitcast=True)
        if HAS_MASTER:
            tl.store(master + places, w, mask=inside)
            tl.store(weight + places, w.to(kind), mask=inside)
        else:
            tl.store(weight + places, _rounded(w, first & _LOWER, kind), mask=inside)
        tl.store(exp_avg + places, _rounded(m, (first >> 16) & _LOWER, moments), mask=inside)
        tl.store(exp_avg_sq + places, _rounded(v, (third >> 16) & _LOWER, moments), mask=inside)
