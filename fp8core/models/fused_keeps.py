"""What a fused block keeps for its backward pass, on tensors without storage.

That is what Transformer Engine's modules keep (``LayerNormLinear``, ``DotProductAttention``,
``Linear``, ``LayerNormMLP``, as of 2.20), or `fp8core.fusion.high_precision` and
`fp8core.fusion.te_overridden`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.conversion.find import is_conv1d
from fp8core.fusion.layouts import through
from fp8core.fusion.parts import AttentionHalf, MLPHalf, NamedLinear
from fp8core.models.planned_fusion import PlannedBlock
from fp8core.models.weight_copies import copy_beside_cast, weight_copies
from fp8core.spec import JobSpec

__all__ = ["fused_forward"]

_FP8, _FP32 = torch.uint8, torch.float32
"""FP8 takes a byte an element, whichever of its formats it is."""


def fused_forward(
    block: PlannedBlock, spec: JobSpec, compute: torch.dtype, *, plain: bool
) -> Callable[..., Tensor]:
    """What to run in the place of ``block.layer.forward`` on tensors without storage."""
    layer, layout = block.layer, block.halves.layout
    # Of the product of gate and up only the row-wise copy is kept; formats scaled by blocks need
    # the column-wise one beside it, and the others transpose it in the backward pass.
    by_blocks = getattr(spec.recipe, "scaling", "delayed") not in ("delayed", "current")
    copies = weight_copies(spec)
    if plain:
        # Autocast's, in bytes, where weights are stored in another dtype.
        weight = next(layer.parameters())
        copies = 0 if weight.dtype == compute else compute.itemsize

    override = getattr(spec.recipe, "override_linear_precision", (False,) * 3)
    chosen = not plain and any(override)
    backward = None if plain else getattr(spec.recipe, "backward_override", None)
    gemms = _Gemms(
        # What a GEMM of the backward pass in high precision reads is kept in that.
        in_high=plain or (chosen and override[2]) or backward == "high_precision",
        chosen=chosen,
        backward=backward is not None,
        by_blocks=by_blocks,
    )

    def bytes_of_weights(linears: Sequence[NamedLinear]) -> int:
        transposed = is_conv1d(linears[0].module)
        return copies + (0 if plain else copy_beside_cast(spec, transposed=transposed))

    def keeps_of(keeps: _Keeps) -> _Keeps:
        # GEMMs whose precision is chosen keep their input for frozen weights too.
        return (
            replace(keeps, always=keeps.always + keeps.if_trained, if_trained=())
            if chosen
            else keeps
        )

    names = list(inspect.signature(type(layer).forward).parameters)[2:]

    def forward(hidden: Tensor, *positional: Any, **options: Any) -> Tensor:
        attention, mlp, adapted = block.halves.attention, block.halves.mlp, block.halves.adapted

        def attend(x: Tensor) -> Tensor:
            assert attention is not None
            linears = (*attention.inputs, attention.o)
            # Kernels without FP8 read their input in whatever dtype it has.
            given = x if (plain or chosen) and attention.norm is not None else x.to(compute)
            keeps = keeps_of(_attention_keeps(attention, gemms, adapted))
            return _fused(given, keeps, bytes_of_weights(linears), compute, linears, adapted)

        def multiply(x: Tensor) -> Any:
            assert mlp is not None
            linears = (*mlp.inputs, mlp.down)
            given = x if plain or chosen else x.to(compute)
            keeps = keeps_of(_mlp_keeps(mlp, gemms, adapted))
            output = _fused(given, keeps, bytes_of_weights(linears), compute, linears, adapted)
            # What the norm gives is one tensor more, that nothing keeps.
            return (output, output.detach().clone()) if mlp.returns_norm else output

        if attention is None:
            options |= dict(zip(names, positional, strict=False))
        return through(
            layer,
            layout,
            hidden,
            None if attention is None else attend,
            None if mlp is None else multiply,
            options,
        )

    return forward


@dataclass(frozen=True)
class _Gemms:
    """``in_high``: whether their inputs are kept in high precision; ``chosen``: whether they are
    those of ``override_linear_precision``; ``backward``: of ``backward_override``; ``by_blocks``:
    whether their format is scaled by blocks."""

    in_high: bool
    chosen: bool
    backward: bool
    by_blocks: bool

    @property
    def keep_norm_output(self) -> bool:
        """LayerNormLinear keeps it as it is, for frozen weights and for adapters too."""
        return self.in_high and self.backward


@dataclass(frozen=True)
class _Keeps:
    """Elements a token by dtype (None: the compute dtype); ``if_trained``: with its weights.

    ``input``: whether the input itself is kept, as a norm's is.
    """

    always: tuple[tuple[int, torch.dtype | None], ...]
    if_trained: tuple[tuple[int, torch.dtype | None], ...]
    input: bool = True


def _attention_keeps(half: AttentionHalf, gemms: _Gemms, adapted: frozenset[str]) -> _Keeps:
    width, kv_width = half.heads * half.head_dim, half.kv_heads * half.head_dim
    normed = half.norm is not None
    always: list[tuple[int, torch.dtype | None]] = [
        (int(normed), _FP32),  # the norm's reciprocal deviation
        (width, None),  # q
        (kv_width, None),
        (kv_width, None),
        (width, None),  # attention's output
        (half.heads, _FP32),  # logarithms of the softmax's sums
    ]
    if half.head_norms:
        always += [(width, None), (kv_width, None)]  # the inputs of q_norm and k_norm
    entered = half.inputs[0].in_features
    has_any = _has_any(half.inputs, adapted)
    if normed and gemms.keep_norm_output:
        return _Keeps((*always, (entered, None)), ())
    if has_any and normed:
        always += _adapters_input(entered, gemms)
    # Without a norm the adapters' input is the half's own, which is also what such a GEMM keeps.
    given = normed or (has_any and not (gemms.in_high and gemms.chosen))
    if gemms.in_high:
        # The second GEMM's input is attention's output itself; the first one's what a norm gave.
        return _Keeps(tuple(always), ((entered, None),), input=given)
    # The inputs of the two GEMMs, column-wise.
    return _Keeps(tuple(always), ((entered, _FP8), (width, _FP8)), input=given)


def _mlp_keeps(half: MLPHalf, gemms: _Gemms, adapted: frozenset[str]) -> _Keeps:
    hidden, inner = half.inputs[0].in_features, half.down.in_features
    always: tuple[tuple[int, torch.dtype | None], ...] = (
        (1, _FP32),
        (len(half.inputs) * inner, None),  # gate and up, before the activation
    )
    if gemms.keep_norm_output:
        always += ((hidden, None),)
    elif _has_any(half.inputs, adapted):
        always += _adapters_input(hidden, gemms)
    if _has_any([half.down], adapted) and not (gemms.in_high and gemms.chosen):
        always += ((inner, None),)  # the adapter's input
    if gemms.keep_norm_output:
        return _Keeps(always, ((inner, None),))
    if gemms.in_high:
        return _Keeps(always, ((hidden, None), (inner, None)))
    if half.activation == "gelu_erf" or gemms.chosen or gemms.backward:
        return _Keeps(always, ((hidden, _FP8), (inner, _FP8)))
    # Unlike LayerNormLinear, LayerNormMLP keeps the normalised input both ways round.
    product = 2 * inner if gemms.by_blocks else inner
    return _Keeps(always, ((2 * hidden, _FP8), (product, _FP8)))


def _adapters_input(features: int, gemms: _Gemms) -> tuple[tuple[int, torch.dtype | None], ...]:
    """LayerNormLinear that gives it keeps its FP8 form as well, for frozen weights too.

    GEMMs whose precision is chosen keep either form by themselves, see ``keeps_of``.
    """
    if gemms.chosen:
        return () if gemms.in_high else ((features, None),)
    return ((features, None),) if gemms.in_high else ((features, None), (features, _FP8))


def _has_any(linears: Sequence[NamedLinear], adapted: frozenset[str]) -> bool:
    return any(linear.name in adapted for linear in linears)


def _fused(
    x: Tensor,
    keeps: _Keeps,
    copies: int,
    compute: torch.dtype,
    linears: Sequence[NamedLinear],
    adapted: frozenset[str],
) -> Tensor:
    # What needs a gradient in a first block of which all but its adapters is frozen.
    adapter = nn.Parameter(torch.empty(0)) if _has_any(linears, adapted) else None
    weights = [linear.weight for linear in linears]
    output: Tensor = _Fused.apply(x, keeps, copies, compute, adapter, *weights)
    return output


class _Fused(torch.autograd.Function):
    """One half: keeps its input, what `_Keeps` says, and ``copies`` bytes an element of weights.

    ``adapter``: a parameter where only adapters are trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keeps: _Keeps,
        copies: int,
        compute: torch.dtype,
        adapter: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        trained = any(ctx.needs_input_grad[5:])
        counts = keeps.always + (keeps.if_trained if trained else ())
        tokens = x.shape[:-1]
        made = [x.new_empty(*tokens, count, dtype=dtype or compute) for count, dtype in counts]
        made += [x.new_empty(copies, *weight.shape, dtype=_FP8) for weight in weights]
        ctx.save_for_backward(*((x,) if keeps.input else ()), *made)
        return torch.empty_like(x, dtype=compute)
