"""Which blocks of a model on the meta device would be fused, and what those keep.

Blocks are recognised as `fp8core.fusion.fuse` does, and the model is called as there; the proof on
numbers is that of a small twin. What an engine's own kernels would refuse shows on a GPU alone.
What a fused block keeps for its backward pass is that of Transformer Engine's modules
(``LayerNormLinear``, ``DotProductAttention``, ``Linear``, ``LayerNormMLP``, as of 2.20), or of
`fp8core.fusion.high_precision` and `fp8core.fusion.te_overridden`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.conversion import Decision
from fp8core.conversion.decide import kept_apart
from fp8core.data.batch import round_up
from fp8core.fusion.block_inputs import AskedBlock
from fp8core.fusion.described import Rotation, described_blocks
from fp8core.fusion.fuse import MIXED
from fp8core.fusion.layouts import through
from fp8core.fusion.parts import AttentionHalf, Halves, MLPHalf, NamedLinear
from fp8core.fusion.reach import unreached
from fp8core.fusion.recognise import NO_BLOCKS, attention_elsewhere, find_blocks
from fp8core.fusion.rotary import RotaryAngles, rotary_angles
from fp8core.fusion.sight import row_length, sights
from fp8core.models.fusion_twin import refused_of_twin
from fp8core.models.weight_copies import weight_copies
from fp8core.spec import AmpRecipe, JobSpec
from fp8core.spec.recipe import token_multiple

__all__ = [
    "NOTHING_FUSED",
    "PlannedBlock",
    "PlannedFusion",
    "fused_forward",
    "fusion_refusal",
    "planned_fusion",
]

_FP8, _FP32 = torch.uint8, torch.float32
"""FP8 takes a byte an element, whichever of its formats it is."""


@dataclass(frozen=True)
class PlannedBlock:
    """A block and those of its halves that would be fused."""

    name: str
    layer: nn.Module
    halves: Halves

    @property
    def asked(self) -> AskedBlock:
        return AskedBlock(
            self.name, self.layer, self.halves.layout, self.halves.attention is not None
        )


@dataclass(frozen=True)
class PlannedFusion:
    """``blocks``: those of which something would be fused; ``found``: how many the model has."""

    blocks: tuple[PlannedBlock, ...] = ()
    found: int = 0
    reasons: tuple[str, ...] = ()
    """Why a block, or half of it, would not be; the same reason may stand here often."""
    plain: bool = False
    """Whether they would be in high precision."""
    loss: bool = False
    elsewhere: bool = False
    """Whether the model attends outside of those that were found too."""

    @property
    def whole(self) -> bool:
        """Whether no attention of the model needs a mask."""
        attention = sum(block.halves.attention is not None for block in self.blocks)
        return attention == self.found > 0 and not self.elsewhere

    @property
    def in_both_halves(self) -> bool:
        """Whether all of every block would be fused."""
        return self._whole_blocks == self.found > 0

    @property
    def _whole_blocks(self) -> int:
        return sum(b.halves.attention is not None and b.halves.mlp is not None for b in self.blocks)

    @property
    def causal(self) -> bool:
        """Whether the attention of its blocks looks back alone."""
        return all(block.halves.causal for block in self.blocks)

    def to_json(self) -> dict[str, object]:
        """``blocks``, ``fused``, ``fused_in_part`` (counts), ``loss`` (whether it is fused too),
        and ``not_because``: reasons with their counts."""
        return {
            "blocks": self.found,
            "fused": self._whole_blocks,
            "fused_in_part": len(self.blocks) - self._whole_blocks,
            "loss": self.loss,
            "not_because": dict(Counter(self.reasons).most_common()),
        }


NOTHING_FUSED = PlannedFusion()


def planned_fusion(
    model: nn.Module,
    decisions: Sequence[Decision],
    spec: JobSpec,
    adapted: frozenset[str] = frozenset(),
    *,
    small: bool = False,
) -> PlannedFusion:
    """``decisions``: of the layers' conversion, not yet done; ``adapted``: the layers that get
    adapters; ``small``: whether the small-GEMM rule keeps the model in bf16."""
    candidates = list(find_blocks(model))
    refusal, loss = fusion_refusal(spec), _fuses_loss(spec)
    if refusal is not None or not candidates:
        return PlannedFusion((), len(candidates), (refusal or NO_BLOCKS,), loss=loss)
    plain = small or spec.recipe.engine == "amp"
    kept = kept_apart(decisions, plain=plain)
    config = getattr(model, "config", None)
    multiple = token_multiple(spec.recipe)
    length = row_length(config, round_up(spec.training.sequence_length, multiple))
    seen = sights(model, [layer for _, layer in candidates], length)
    described = list(
        described_blocks(
            candidates,
            config,
            kept=kept,
            adapted=adapted,
            seen=seen,
            rotation=lambda: _rotation(model, length),
        )
    )
    refused = refused_of_twin(model, candidates)
    blocks, reasons = [], []
    for found in described:
        name, halves = found.name, found.halves
        if name in refused:
            refused[name].take_from(halves)
        # The names of layers differ from block to block, their reasons need not.
        reasons += [reason.replace(f"{name}.", "") for reason in halves.reasons]
        if halves.attention is not None or halves.mlp is not None:
            blocks.append(PlannedBlock(name, found.layer, halves))
    elsewhere = attention_elsewhere(model, [layer for _, layer in candidates])
    planned = PlannedFusion(tuple(blocks), len(candidates), tuple(reasons), plain, loss, elsewhere)
    withdrawn = _withdrawn(model, planned)
    if withdrawn is None:
        return planned
    return replace(planned, blocks=(), reasons=(*reasons, *[withdrawn] * len(candidates)))


def _withdrawn(model: nn.Module, planned: PlannedFusion) -> str | None:
    """Why none of the blocks would be fused after all; `fuse` has the same reasons."""
    if not planned.blocks:
        return None
    if len({block.halves.causal for block in planned.blocks}) > 1:
        return MIXED
    asked = [block.asked for block in planned.blocks]
    return unreached(model, asked, masked=not planned.whole, causal=planned.causal)


def _fuses_loss(spec: JobSpec) -> bool:
    """On a GPU and in bf16 whatever becomes of the blocks."""
    in_bf16 = getattr(spec.recipe, "dtype", "bf16") == "bf16"
    return spec.conversion.fuse == "auto" and in_bf16 and spec.resources.device != "cpu"


def fusion_refusal(spec: JobSpec) -> str | None:
    """Why no block of any model would be fused under ``spec``, or None."""
    if spec.conversion.fuse == "none":
        return "conversion.fuse is none"
    if isinstance(spec.recipe, AmpRecipe):
        if spec.resources.device == "cpu":
            return "blocks are fused without FP8 on CUDA devices only"
        if spec.recipe.dtype != "bf16":
            return f"blocks are fused without FP8 in bf16 only, and this is {spec.recipe.dtype}"
        return None
    if spec.recipe.engine != "te":
        return f"the engine {spec.recipe.engine} has no fused blocks"
    if all(getattr(spec.recipe, "override_linear_precision", (False,))):
        return "override_linear_precision keeps all three GEMMs in high precision"
    if getattr(spec.recipe, "backward_override", None) is not None:
        return "Transformer Engine's LayerNormMLP has no backward_override"
    return None


def _rotation(model: Any, length: int) -> Rotation:
    """`rotary_angles` of the model's embedding, built again with values."""
    held = nn.ModuleList()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            try:
                held.append(type(module)(config=module.config))
            # Of foreign code: any class may want other arguments.
            except Exception as error:
                text = f"{type(module).__name__} cannot be built: {type(error).__name__}: {error}"
                return RotaryAngles(torch.empty(0)), text  # there are some, whatever they are
    return rotary_angles(held, length)


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
    # What a GEMM of the backward pass in high precision reads is kept in that.
    in_high = plain or (chosen and override[2])

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
            keeps = keeps_of(_attention_keeps(attention, in_high, adapted, chosen=chosen))
            return _fused(given, keeps, copies, compute, linears, adapted)

        def multiply(x: Tensor) -> Any:
            assert mlp is not None
            linears = (*mlp.inputs, mlp.down)
            given = x if plain or chosen else x.to(compute)
            keeps = keeps_of(_mlp_keeps(mlp, by_blocks, in_high, adapted, chosen=chosen))
            output = _fused(given, keeps, copies, compute, linears, adapted)
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
class _Keeps:
    """Elements a token by dtype (None: the compute dtype); ``if_trained``: with its weights.

    ``input``: whether the input itself is kept, as a norm's is.
    """

    always: tuple[tuple[int, torch.dtype | None], ...]
    if_trained: tuple[tuple[int, torch.dtype | None], ...]
    input: bool = True


def _attention_keeps(
    half: AttentionHalf, plain: bool, adapted: frozenset[str], *, chosen: bool
) -> _Keeps:
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
    if has_any and normed:
        always += _adapters_input(entered, plain, chosen)
    # Without a norm the adapters' input is the half's own, which is also what such a GEMM keeps.
    given = normed or (has_any and not (plain and chosen))
    if plain:
        # The second GEMM's input is attention's output itself; the first one's what a norm gave.
        return _Keeps(tuple(always), ((entered, None),), input=given)
    # The inputs of the two GEMMs, column-wise.
    return _Keeps(tuple(always), ((entered, _FP8), (width, _FP8)), input=given)


def _mlp_keeps(
    half: MLPHalf, by_blocks: bool, plain: bool, adapted: frozenset[str], *, chosen: bool
) -> _Keeps:
    hidden, inner = half.inputs[0].in_features, half.down.in_features
    always: tuple[tuple[int, torch.dtype | None], ...] = (
        (1, _FP32),
        (len(half.inputs) * inner, None),  # gate and up, before the activation
    )
    if _has_any(half.inputs, adapted):
        always += _adapters_input(hidden, plain, chosen)
    if _has_any([half.down], adapted) and not (plain and chosen):
        always += ((inner, None),)  # the adapter's input
    if plain:
        return _Keeps(always, ((hidden, None), (inner, None)))
    if half.activation == "gelu_erf" or chosen:
        return _Keeps(always, ((hidden, _FP8), (inner, _FP8)))
    # Unlike LayerNormLinear, LayerNormMLP keeps the normalised input both ways round.
    product = 2 * inner if by_blocks else inner
    return _Keeps(always, ((2 * hidden, _FP8), (product, _FP8)))


def _adapters_input(
    features: int, plain: bool, chosen: bool
) -> tuple[tuple[int, torch.dtype | None], ...]:
    """LayerNormLinear that gives it keeps its FP8 form as well, for frozen weights too.

    GEMMs whose precision is chosen keep either form by themselves, see ``keeps_of``.
    """
    if chosen:
        return () if plain else ((features, None),)
    return ((features, None),) if plain else ((features, None), (features, _FP8))


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
