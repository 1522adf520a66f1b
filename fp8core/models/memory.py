"""An estimate of the GPU memory of a training step, by the rows of ``training.precision``.

Weights, gradients and optimizer states are exact. What a micro-batch keeps for its backward pass is
counted by a dry run of the model's own code (``fp8core.models.dry_run``), or where that is not
possible, layer by layer:

* a Linear keeps its input, once for those that share it (q, k, v; gate, up): one byte an element
  where it runs in FP8, else the compute dtype;
* a norm keeps its input;
* what a Linear gives is kept where an activation function, a gate or attention (scaled-dot-product,
  no score matrix) follows, which is every Linear that does not lead to fewer features, and all
  projections of an attention module.

Not all of it is there at once. The peak is that of three moments: when the gradient of the loss is
made, activations are whole, and logits are there three times in fp32 (log-softmax, its gradient,
that of its input); when the backward pass ends, gradients are whole; and the optimizer's step.
Where blocks are fused the cross-entropy is too: the gradient is written over the logits, and the
first moment lasts until the output head has its own gradient. With gradient checkpointing a block
keeps only its input, and one block at a time is whole; ``recomputed_blocks`` bounds how many do.

It is the memory of steps that no CUDA graph replays (``fp8core.models.planned_graphs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8core.conversion import Decision
from fp8core.conversion.find import is_conv1d, output_heads, sequence_level_layers
from fp8core.conversion.norms import is_norm
from fp8core.models.dry_run import dry_run
from fp8core.models.planned_fusion import NOTHING_FUSED, PlannedFusion
from fp8core.models.weight_copies import (
    copy_beside_cast,
    keeps_casts,
    shared_weights,
    stores_base,
    weight_copies,
)
from fp8core.spec import JobSpec
from fp8core.training.moments import bytes_of_moments
from fp8core.training.precision import dtype_of

__all__ = ["MemoryEstimate", "estimate_memory", "linear_widths"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "none": 0}
# log-softmax, its gradient and its input's gradient, each fp32.
_LOSS_BYTES = 3 * 4
# cuBLAS's own, which PyTorch allocates, and Transformer Engine's.
_WORKSPACES = {"te": 64 << 20, "emulated": 32 << 20, "torchao": 32 << 20, "amp": 32 << 20}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU. ``rows``: by use, and the peak, ``total``, which is less than their sum,
    as not all are there at once. ``moments``: how much is there when; ``total`` is the largest."""

    rows: dict[str, int]
    moments: dict[str, int]


def estimate_memory(
    model: nn.Module,
    decisions: Sequence[Decision],
    spec: JobSpec,
    *,
    tokens: int,
    adapted: Sequence[nn.Module] = (),
    heads: Sequence[nn.Module] = (),
    fusion: PlannedFusion = NOTHING_FUSED,
) -> MemoryEstimate:
    """For micro-batches of ``tokens`` tokens, by the rows of the method's own table.

    ``compute_weight_copies`` are the FP8 copies of converted weights and autocast's copies of
    the other Linears' weights where those are stored in another dtype (of a frozen base in FP8,
    what the backward pass turns over at a time); ``activations`` hold what the loss needs.
    ``adapted``: the linear layers with a LoRA adapter, whose parameters are fp32;
    ``heads``: modules of which fp32 copies are trained beside them; all else is frozen.
    ``fusion``: the blocks that would be fused. ``model`` lies on the meta device and is of no use
    afterwards.
    """
    precision = spec.training.precision
    size = sum(p.numel() for p in model.parameters())
    shapes = _adapter_shapes(adapted, spec)
    shapes += [parameter.shape for head in heads for parameter in head.parameters()]
    added = sum(shape.numel() for shape in shapes)
    trained = added or size
    table = _tied_table(model)
    converted = {id(d.layer.module) for d in decisions if d.reason is None and d.norm is None}
    copies = _weight_copies(model, converted, spec)
    # Kept casts of the weights outlive the backward pass.
    lasting = 0
    if keeps_casts(spec, stored=False):
        lasting = _weight_copies(model, converted, spec, casts=True)
    stored, turned = _stored(model, decisions, spec, fused=bool(fusion.blocks))
    whole = size * _BYTES[precision.weights]
    rows = {
        "weights": whole - stored * (_BYTES[precision.weights] - 1) + added * _BYTES["fp32"],
        "master_weights": trained * _BYTES[precision.master_weights],
        "gradients": trained * _BYTES[precision.gradients],
        "optimizer_states": bytes_of_moments(
            shapes or (p.shape for p in model.parameters()),
            dtype_of(precision.optimizer_states),
        ),
        "compute_weight_copies": copies + turned,
        "workspaces": _WORKSPACES[spec.recipe.engine],
    }
    if added:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    kept = _kept(model, decisions, converted, spec, tokens, {id(m) for m in adapted}, fusion)
    always = sum(rows[name] for name in ("weights", "master_weights", "optimizer_states"))
    always += rows["workspaces"]
    accumulating = spec.training.gradient_accumulation > 1
    gradients = rows["gradients"]
    at_loss = always + kept.forward + max(kept.loss, turned) + (gradients if accumulating else 0)
    at_end = always + gradients + lasting + kept.last_block + turned
    if not added:
        at_end += table * _BYTES[precision.weights]
    # Blocks that are recomputed have no casts waiting for their backward pass.
    in_forward = int(copies * (1 - kept.recomputed))
    rows["activations"] = max(0, kept.forward - in_forward) + kept.loss
    moments = {
        "gradient of the loss": at_loss,
        "end of the backward pass": at_end,
        # Its kernels read and write each parameter once, and hold nothing beside it.
        "optimizer": always + gradients + lasting,
    }
    if stored:
        # As it came, before it is cast; adapters and all else come after that.
        moments["loading"] = whole
    rows["total"] = max(moments.values())
    return MemoryEstimate(rows, moments)


@dataclass(frozen=True)
class _Kept:
    """Bytes: at the end of the forward pass, for the gradient of the loss, by the block that is
    last in the backward pass. ``recomputed``: the share of the blocks that are."""

    forward: int
    loss: int
    last_block: int
    recomputed: float


def _kept(
    model: nn.Module,
    decisions: Sequence[Decision],
    converted: set[int],
    spec: JobSpec,
    tokens: int,
    adapted: set[int],
    fusion: PlannedFusion,
) -> _Kept:
    blocks = _blocks(model)
    recomputed = _recomputed(spec, len(blocks))
    share = recomputed / max(1, len(blocks))
    formula = _activations(model, converted, spec, tokens) + _weight_copies(model, converted, spec)
    width = _head_width(model)
    head = _head_gradient(model, converted, spec, frozen=bool(adapted)) if fusion.loss else None
    try:
        run = dry_run(model, decisions, blocks, spec, adapted, fusion)
    # Anything may fail in foreign code on tensors without values; the formula is there for that.
    except Exception:
        loss = _loss_bytes(tokens * width, head, _compute_bytes(spec))
        return _Kept(formula, loss, formula // max(1, len(blocks)), share)
    last = max(run.blocks, default=0)
    forward = run.total - sum(run.blocks[:recomputed]) + int(run.block_inputs * share)
    return _Kept(forward, _loss_bytes(run.logits, head, _compute_bytes(spec)), last, share)


def _recomputed(spec: JobSpec, blocks: int) -> int:
    """How many blocks are recomputed. As many as there are, where the spec asks for more."""
    if not spec.training.gradient_checkpointing:
        return 0
    wanted = spec.training.recomputed_blocks
    return blocks if wanted is None else min(wanted, blocks)


@dataclass(frozen=True)
class _HeadGradient:
    """Bytes of the output head's weight gradient as its GEMM gives it, and as it is stored (0
    where that is the same tensor); and what an FP8 head casts of a logit's gradient."""

    computed: int
    stored: int
    cast: int


def _head_gradient(
    model: nn.Module, converted: set[int], spec: JobSpec, *, frozen: bool
) -> _HeadGradient:
    heads = output_heads(model)
    found = [m for m in model.modules() if id(m) in heads and isinstance(m, nn.Linear)]
    size = 0 if frozen else max((m.weight.numel() for m in found), default=0)
    compute, stored = _compute_bytes(spec), _BYTES[spec.training.precision.weights]
    # Row-wise for one GEMM and column-wise for the other.
    cast = 2 if any(id(m) in converted for m in found) else 0
    return _HeadGradient(size * compute, size * stored if stored != compute else 0, cast)


def _loss_bytes(logits: int, head: _HeadGradient | None, compute: int) -> int:
    """From the logits to the gradient of the head; ``head``: None where the loss is not fused."""
    if head is None:
        return _LOSS_BYTES * logits
    in_gemm = logits * (compute + head.cast) + head.computed
    return max(in_gemm, head.computed + head.stored)


def _adapter_shapes(adapted: Sequence[nn.Module], spec: JobSpec) -> list[torch.Size]:
    if spec.adapter is None:
        return []
    widths = [width for module in adapted for width in linear_widths(module)]
    return [torch.Size((spec.adapter.rank, width)) for width in widths]


def _head_width(model: nn.Module) -> int:
    heads = output_heads(model)
    found = [m for m in model.modules() if id(m) in heads and isinstance(m, nn.Linear)]
    of_sequences = sequence_level_layers(model)
    return max((m.out_features for m in found if id(m) not in of_sequences), default=0)


def _tied_table(model: nn.Module) -> int:
    """Elements of an embedding table that is the output head too, and has two gradients at once."""
    tables = {
        id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)
    }
    heads = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, nn.Linear)}
    return max((size for key, size in tables.items() if key in heads), default=0)


def _compute_bytes(spec: JobSpec) -> int:
    return _BYTES[getattr(spec.recipe, "dtype", "bf16")]


def _weight_copies(
    model: nn.Module, converted: set[int], spec: JobSpec, *, casts: bool = False
) -> int:
    """``casts``: of converted layers the casts alone, not what waits for dgrad beside them."""
    cast = _compute_bytes(spec)
    if cast == _BYTES[spec.training.precision.weights]:
        cast = 0
    total = 0
    base, shared = stores_base(spec), shared_weights(model)
    for module in model.modules():
        stored = False
        if isinstance(module, nn.Linear) or is_conv1d(module):
            size = _weight_size(module)
            stored = base and id(module._parameters.get("weight")) not in shared
        elif isinstance(module, nn.MultiheadAttention):
            # Of its input projections, which only a pattern of the spec would part.
            keys = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights = [module._parameters.get(key) for key in keys]
            size = sum(weight.numel() for weight in weights if weight is not None)
        else:
            continue
        if id(module) not in converted:
            # Of a frozen weight autocast keeps none for the next micro-batch.
            total += 0 if casts and spec.adapter is not None else size * cast
            continue
        beside = 0 if casts else copy_beside_cast(spec, transposed=is_conv1d(module))
        total += size * (weight_copies(spec, stored=stored) + beside)
    return total


def _stored(
    model: nn.Module, decisions: Sequence[Decision], spec: JobSpec, *, fused: bool
) -> tuple[int, int]:
    """Elements of frozen weights that lie in FP8; and bytes of what dgrad turns over of them.

    Transformer Engine does so before Blackwell, in the backward pass of the layer: of one GEMM,
    or of both of an MLP in one module, whose first is of gate and up together.
    """
    if not stores_base(spec):
        return 0, 0
    shared = shared_weights(model)
    found = [d.layer.module for d in decisions if d.reason is None and d.layer.kind == "linear"]
    sizes = [_weight_size(m) for m in found if id(m._parameters["weight"]) not in shared]
    largest = max(sizes, default=0) if spec.recipe.engine == "te" else 0
    return sum(sizes), largest * (3 if fused else 1)


def _activations(model: nn.Module, converted: set[int], spec: JobSpec, tokens: int) -> int:
    blocks = _blocks(model)
    in_blocks = {id(m) for block in blocks for m in block.modules()}
    of_blocks = [_kept_by(block, converted, spec) for block in blocks]
    recomputed = _recomputed(spec, len(blocks))
    per_token = sum(of_blocks[recomputed:])
    if recomputed:
        hidden = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
        per_token += recomputed * hidden * _compute_bytes(spec) + max(of_blocks)
    outside = [m for m in model.modules() if id(m) not in in_blocks]
    of_sequences = sequence_level_layers(model)
    for module in outside:
        if isinstance(module, nn.Linear) and id(module) not in of_sequences:
            per_token += module.in_features * _compute_bytes(spec)
    return per_token * tokens


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the stack: the longest ModuleList whose items are all of one class."""
    lists = [
        list(m)
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and len(m) and len({type(item) for item in m}) == 1
    ]
    return max(lists, key=len, default=[])


def _kept_by(block: nn.Module, converted: set[int], spec: JobSpec) -> int:
    """Bytes that one block keeps for a token."""
    compute = _compute_bytes(spec)
    kept = 0
    for parent in block.modules():
        inputs: dict[int, int] = {}
        for child in parent.children():
            if isinstance(child, nn.Linear) or is_conv1d(child):
                width, output = linear_widths(child)
                each = 1 if id(child) in converted else compute
                inputs[width] = max(inputs.get(width, 0), each)
                # What an MLP's last Linear adds to the residual stream is kept by nobody.
                if output >= width or _is_projection(parent):
                    kept += output * compute
            elif is_norm(child):
                kept += _norm_width(child) * compute
        kept += sum(width * each for width, each in inputs.items())
    return kept


def _is_projection(parent: nn.Module) -> bool:
    return "Attention" in type(parent).__name__


def linear_widths(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a Linear or of transformers' Conv1D."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    rows, columns = linear.weight.shape  # type: ignore[misc]  # a Tensor
    return int(rows), int(columns)


def _weight_size(module: nn.Module) -> int:
    return int(module.weight.numel())  # type: ignore[operator]  # a Tensor


def _norm_width(norm: nn.Module) -> int:
    weight = norm._parameters.get("weight")
    return 0 if weight is None else weight.numel()
