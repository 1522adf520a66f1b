"""An estimate of the GPU memory of a training step, by the rows of ``training.precision``.

Weights, gradients and optimizer states are exact. Activations are what the layers of one
micro-batch keep for the backward pass, counted layer by layer:

* a Linear keeps its input, once for those that share it (q, k, v; gate, up): one byte an element
  where it runs in FP8, else the compute dtype;
* a norm keeps its input;
* what a Linear gives is kept where an activation function, a gate or attention (scaled-dot-product,
  no score matrix) follows, which is every Linear that does not lead to fewer features, and all
  projections of an attention module;
* the output head's logits are there in the compute dtype, in fp32, and as their fp32 gradient.

With gradient checkpointing a block keeps only its input, and one block at a time is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fp8core.conversion import Decision
from fp8core.conversion.find import is_conv1d, output_heads, sequence_level_layers
from fp8core.conversion.norms import is_norm
from fp8core.spec import JobSpec

__all__ = ["memory_rows"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "none": 0}
_MOMENTS = 2
# Bytes an FP8 weight's copies take while a step runs. Transformer Engine keeps a transposed one
# too (before Blackwell); torchao casts anew for each GEMM.
_FP8_COPIES = {"te": 2, "emulated": 1, "torchao": 0, "amp": 0}


def memory_rows(
    model: nn.Module, decisions: Sequence[Decision], spec: JobSpec, *, tokens: int
) -> dict[str, int]:
    """Bytes on one GPU by row, and their ``total``, for micro-batches of ``tokens`` tokens.

    ``compute_weight_copies`` are the FP8 copies of converted weights and autocast's copies of
    the other Linears' weights where those are stored in another dtype.
    """
    precision = spec.training.precision
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    converted = {id(d.layer.module) for d in decisions if d.reason is None and d.norm is None}
    rows = {
        "weights": size * _BYTES[precision.weights],
        "master_weights": trained * _BYTES[precision.master_weights],
        "gradients": trained * _BYTES[precision.gradients],
        "optimizer_states": trained * _MOMENTS * _BYTES[precision.optimizer_states],
        "compute_weight_copies": _weight_copies(model, converted, spec),
        "activations": _activations(model, converted, spec, tokens),
    }
    rows["total"] = sum(rows.values())
    return rows


def _compute_bytes(spec: JobSpec) -> int:
    return _BYTES[getattr(spec.recipe, "dtype", "bf16")]


def _weight_copies(model: nn.Module, converted: set[int], spec: JobSpec) -> int:
    cast = _compute_bytes(spec)
    if cast == _BYTES[spec.training.precision.weights]:
        cast = 0
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) or is_conv1d(module):
            each = _FP8_COPIES[spec.recipe.engine] if id(module) in converted else cast
            total += _weight_size(module) * each
    return total


def _activations(model: nn.Module, converted: set[int], spec: JobSpec, tokens: int) -> int:
    blocks = _blocks(model)
    in_blocks = {id(m) for block in blocks for m in block.modules()}
    of_blocks = [_kept_by(block, converted, spec) for block in blocks]
    if spec.training.gradient_checkpointing and blocks:
        hidden = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
        per_token = len(blocks) * hidden * _compute_bytes(spec) + max(of_blocks)
    else:
        per_token = sum(of_blocks)
    outside = [m for m in model.modules() if id(m) not in in_blocks]
    heads = output_heads(model)
    of_sequences = sequence_level_layers(model)
    for module in outside:
        if not (isinstance(module, nn.Linear) and id(module) not in of_sequences):
            continue
        per_token += module.in_features * _compute_bytes(spec)
        if id(module) in heads:
            per_token += module.out_features * (_compute_bytes(spec) + 2 * _BYTES["fp32"])
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
                width, output = _widths(child)
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


def _widths(linear: nn.Module) -> tuple[int, int]:
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
