"""The kernel of `AdamW` whose moments are block floats of 8 bits, on a GPU.

As `adamw_kernel`, with codes and shared exponents (`fp8core.numerics.block_floats`) in the moments'
place: they are read, and written in the same pass, so nothing of a parameter's size is made beside
them. A program has eight blocks of 256 elements. Imported where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8core.numerics.block_floats import BLOCK, MOMENT, ROOT
from fp8core.training.adamw_kernel import _MIX, _one_less_power
from fp8core.training.adamw_kernel import _rounded as rounded

__all__ = ["update_8bit"]

_ROWS = 8
_LOWER = tl.constexpr(0xFFFF)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def update_8bit(
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
    """One step of one parameter, as `adamw_kernel.update`.

    ``state``: ``exp_avg`` and ``exp_avg_sq`` (codes of `MOMENT` and of `ROOT`),
    ``exp_avg_exponents`` and ``exp_avg_sq_exponents``, ``step`` and perhaps ``master``.
    """
    elements = weight.numel()
    if elements == 0:
        return
    master = state.get("master")
    _step[(triton.cdiv(elements, _ROWS * BLOCK),)](
        weight,
        gradient,
        state["exp_avg"],
        state["exp_avg_exponents"],
        state["exp_avg_sq"],
        state["exp_avg_sq_exponents"],
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
        M_BITS=MOMENT.mantissa,
        R_BITS=ROOT.mantissa,
        ROWS=_ROWS,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _lowest(exponents, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is taken from an fp32 number's upper bits to make its code, by block."""
    return (exponents[:, None] - 15) << MANTISSA


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(magnitude, exponents, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes without their sign, int32 [ROWS, BLOCK], as fp32."""
    bits = (magnitude + _lowest(exponents, MANTISSA)) << (23 - MANTISSA)
    return tl.where(magnitude == 0, 0, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _new_exponents(bits, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the blocks with these magnitudes, as bits of fp32."""
    largest = tl.max(bits, axis=1) + ((1 << (23 - MANTISSA)) - 1)
    return tl.minimum(tl.maximum(largest >> 23, 16), 254)


@triton.jit  # type: ignore[untyped-decorator]
def _code(bits, exponents, noise, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """``noise``: 16 random bits, which become the upper ones of those that are cut off."""
    upper = (bits + (noise << (7 - MANTISSA))) >> (23 - MANTISSA)
    return upper - _lowest(exponents, MANTISSA)


_PER_STEP = ["lr", "beta1", "beta2", "eps", "weight_decay", "seed"]


@triton.jit(do_not_specialize=_PER_STEP)  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    exp_avg,
    exp_avg_exponents,
    exp_avg_sq,
    exp_avg_sq_exponents,
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
    M_BITS: tl.constexpr,
    R_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if HAS_UNLESS:
        elements = tl.where(tl.load(unless) == 0, elements, 0)
    inside = places < elements
    row_inside = rows * BLOCK < elements

    count = tl.load(step)
    rate = lr / _one_less_power(beta1, count)
    scale = 1.0 / tl.sqrt(_one_less_power(beta2, count))

    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor)
    w = tl.load(master + places, mask=inside, other=0.0).to(tl.float32)
    m_code = tl.load(exp_avg + places, mask=inside, other=0).to(tl.int32)
    m_exponents = tl.load(exp_avg_exponents + rows, mask=row_inside, other=0).to(tl.int32)
    r_code = tl.load(exp_avg_sq + places, mask=inside, other=0).to(tl.int32)
    r_exponents = tl.load(exp_avg_sq_exponents + rows, mask=row_inside, other=0).to(tl.int32)
    m = _decoded(m_code & 0x7F, m_exponents, M_BITS)
    m = tl.where(m_code > 127, -m, m)
    r = _decoded(r_code, r_exponents, R_BITS)

    w = w * (1.0 - lr * weight_decay)
    m = m + (1.0 - beta1) * (g - m)
    r = tl.sqrt(beta2 * r * r + (1.0 - beta2) * g * g)
    w = w - rate * m / (r * scale + eps)

    # A word of 32 bits for each element, of which three times 16 are made as in `adamw_kernel`.
    quarter = tl.arange(0, BLOCK // 4).to(tl.uint32)
    four = (rows * (BLOCK // 4)).to(tl.uint32)[:, None] + quarter[None, :]
    a, b, c, d = tl.randint4x(seed, four, n_rounds=7)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    first = word.to(tl.int32, bitcast=True)
    third = (word * _MIX).to(tl.int32, bitcast=True)

    kind = weight.dtype.element_ty
    if HAS_MASTER:
        tl.store(master + places, w, mask=inside)
        tl.store(weight + places, w.to(kind), mask=inside)
    else:
        tl.store(weight + places, rounded(w, first & _LOWER, kind), mask=inside)

    m_bits = m.to(tl.int32, bitcast=True) & _MAGNITUDE
    m_exponents = _new_exponents(m_bits, M_BITS)
    m_code = _code(m_bits, m_exponents, (first >> 16) & _LOWER, M_BITS)
    m_code = tl.minimum(tl.maximum(m_code, 0), 127)
    m_code = tl.where((m < 0) & (m_code > 0), m_code | 0x80, m_code)
    tl.store(exp_avg + places, m_code.to(tl.uint8), mask=inside)
    tl.store(exp_avg_exponents + rows, m_exponents.to(tl.uint8), mask=row_inside)

    r_bits = r.to(tl.int32, bitcast=True)
    r_exponents = _new_exponents(r_bits, R_BITS)
    r_code = _code(r_bits, r_exponents, (third >> 16) & _LOWER, R_BITS)
    r_code = tl.where(r_bits == 0, 0, tl.minimum(tl.maximum(r_code, 1), 255))
    tl.store(exp_avg_sq + places, r_code.to(tl.uint8), mask=inside)
    tl.store(exp_avg_sq_exponents + rows, r_exponents.to(tl.uint8), mask=row_inside)
