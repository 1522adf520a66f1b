"""The kernel of `AdamW` on a GPU: one reading and one writing of each parameter and its states.

Whatever is stored in bf16 is rounded stochastically here too, with random bits that follow from a
seed and an element's place alone (Philox, Salmon et al., SC 2011, with 7 rounds): the same seed
gives the same weights, on any GPU and in whatever order blocks run. Imported where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["update"]

_BLOCK = 2048
_EXPONENT = tl.constexpr(0x7F800000)
_UPPER = tl.constexpr(-65536)
_LOWER = tl.constexpr(0xFFFF)


def update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
    factor: Tensor | None,
    unless: Tensor | None,
) -> None:
    """One step of one parameter, whose ``state["step"]`` counts this step already.

    ``state``: ``exp_avg``, ``exp_avg_sq`` (bf16 or fp32), ``step`` (fp32, 0-dim) and perhaps
    ``master`` (fp32). All contiguous and on one device. ``factor``: what
    the gradient counts with. Where ``unless`` is 1 no bit changes.
    """
    elements = weight.numel()
    if elements == 0:
        return
    master = state.get("master")
    _step[(triton.cdiv(elements, _BLOCK),)](
        weight,
        gradient,
        state["exp_avg"],
        state["exp_avg_sq"],
        weight if master is None else master,
        state["step"],
        state["step"] if factor is None else factor,
        state["step"] if unless is None else unless,
        elements,
        lr,
        *betas,
        eps,
        weight_decay,
        seed,
        HAS_MASTER=master is not None,
        HAS_FACTOR=factor is not None,
        HAS_UNLESS=unless is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded(value, bits, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 as ``KIND``; as bf16 with 16 random bits added below its last one, then cut off."""
    if tl.bfloat16 == KIND:
        own = value.to(tl.int32, bitcast=True)
        finite = (own & _EXPONENT) != _EXPONENT
        own = tl.where(finite, own + bits, own) & _UPPER
        return own.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return value.to(KIND)


_PER_STEP = ["lr", "beta1", "beta2", "eps", "weight_decay", "seed"]


@triton.jit(do_not_specialize=_PER_STEP)  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    exp_avg,
    exp_avg_sq,
    master,
    step,
    factor,
    unless,
    elements,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    seed,
    HAS_MASTER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_UNLESS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    if HAS_UNLESS:
        elements = tl.where(tl.load(unless) == 0, elements, 0)
    inside = places < elements

    count = tl.load(step)
    correction1 = 1.0 - tl.exp(count * tl.log(beta1))
    correction2 = tl.sqrt(1.0 - tl.exp(count * tl.log(beta2)))

    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor)
    m = tl.load(exp_avg + places, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + places, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(master + places, mask=inside, other=0.0).to(tl.float32)

    w = w - lr * weight_decay * w
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w - (lr / correction1) * m / (tl.sqrt(v) / correction2 + eps)

    # Four words of 32 bits for two elements, which need three halves each.
    pair = (block * (BLOCK // 2)).to(tl.uint32) + tl.arange(0, BLOCK // 2).to(tl.uint32)
    one, two, three, four = tl.randint4x(seed, pair, n_rounds=7)
    first = tl.interleave(one, three).to(tl.int32, bitcast=True)
    second = tl.interleave(two, four).to(tl.int32, bitcast=True)

    kind = weight.dtype.element_ty
    if HAS_MASTER:
        tl.store(master + places, w, mask=inside)
        tl.store(weight + places, w.to(kind), mask=inside)
    else:
        tl.store(weight + places, _rounded(w, first & _LOWER, kind), mask=inside)
    moments = exp_avg.dtype.element_ty
    tl.store(exp_avg + places, _rounded(m, (first >> 16) & _LOWER, moments), mask=inside)
    tl.store(exp_avg_sq + places, _rounded(v, second & _LOWER, moments), mask=inside)
