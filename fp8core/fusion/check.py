"""Proof that a fused block computes what the block computes: outputs and gradients, before use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.fusion.blocks import FusedBlock
from fp8core.fusion.gradient_sketches import sketched_gradients
from fp8core.fusion.layouts import PostNorm
from fp8core.fusion.modes import in_training
from fp8core.fusion.parts import BlockParts, Halves
from fp8core.fusion.rotary import RotaryAngles
from fp8core.fusion.sequences import Sequences
from fp8core.fusion.stand_ins import in_dtype, read_by_gemms

__all__ = ["BOUND", "BOUNDS", "difference", "narrowed", "refusal"]

BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""The largest difference allowed, relative to the 2-norm of what is compared, by compute dtype.

Two ways to compute a block round at different places: in bf16 (8 bits) each rounding is 0.4 % at
most, and a gradient passes some twenty of them. Two rows of a matrix exchanged, a wrong angle or a
wrong mask differ by tens of per cent.
"""
BOUND = BOUNDS[torch.bfloat16]

_GRADIENT = "the gradient of "
_OUTPUT, _INPUT = "the output", f"{_GRADIENT}the input"
_DRAWS = 3
_ROWS, _LENGTH = 2, 128
_DOCUMENTS = (0, 80, 128, 144, 256)
_SMALL = 2.0**-9
"""Values whose squares are about as large as what norms add to a variance, so that it shows."""
_NARROW = 40


def narrowed(halves: Halves) -> Halves | None:
    """``halves`` with a window that shows in the rows compared; None where theirs does, if any.

    A window beyond those rows hides nothing in them, and attention that forgot it would pass.
    """
    attention = halves.attention
    if attention is None or attention.window is None or attention.window < _LENGTH:
        return None
    return replace(halves, attention=replace(attention, window=_NARROW))


def refusal(block: FusedBlock, parts: BlockParts, angles: RotaryAngles | None) -> str | None:
    """Why ``block`` must not be fused; None where all that is compared agrees.

    Random inputs of two rows, once each a sequence, and once small ones with documents packed in
    them; not small where no norm is before attention, which would then see nothing but biases.
    What differs is tried with other inputs: a gradient that is small beside what it is a sum of
    may differ by its roundings once in a while, and a wrong form differs every time.
    """
    small = 1.0 if isinstance(block.layout, PostNorm) else _SMALL
    parameter = next(block.layer.parameters())
    device = parameter.device
    dtype = torch.bfloat16 if device.type == "cuda" else parameter.dtype
    packed = torch.tensor(_DOCUMENTS, dtype=torch.int32, device=device)
    for kind, size, sequences in (
        ("whole rows", 1.0, Sequences(_ROWS, _LENGTH)),
        ("packed documents", small, Sequences(_ROWS, _LENGTH, packed)),
    ):
        told = None
        for draw in range(_DRAWS):
            try:
                found = difference(block, parts, angles, sequences, dtype, size, draw)
            except torch.OutOfMemoryError:
                raise
            except _Incomparable as error:
                return f"it cannot be called as its fused form is: {error}"
            # The kernels of a fused part may refuse shapes and masks in their own ways.
            except Exception as error:
                return f"its fused form fails on {kind}: {_told(error)}"
            differs = _first_beyond(found, BOUNDS[dtype], kind)
            told = told or differs
            if differs is None:
                break
        else:
            return told
    return None


def _first_beyond(found: dict[str, float], bound: float, kind: str) -> str | None:
    """The first, not the worst: of a wrong output all gradients are wrong, some look worse."""
    for what, value in found.items():
        if not value <= bound:
            return f"{what} of its fused form differs by {value:.2g} on {kind} (bound {bound:g})"
    return None


class _Incomparable(Exception):
    """The plain block cannot be called with what `difference` gives it."""


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def difference(
    block: FusedBlock,
    parts: BlockParts,
    angles: RotaryAngles | None,
    sequences: Sequences,
    dtype: torch.dtype,
    size: float = 1.0,
    draw: int = 0,
) -> dict[str, float]:
    """How far the fused block is from the plain one, by what is compared, relative in 2-norm.

    ``size``: the standard deviation of the inputs; ``draw``: which of them. The residual is taken
    off the output: beside it, what a block adds would be small. Attention's weights are not dropped
    out, as kernels draw random numbers each in their own order; what else drops out is the same on
    both ways. Of large gradients a sketch is compared, so that a proof holds one of them at a time.
    """
    layer: Any = block.layer
    parameters = {f"{_GRADIENT}{n}": p for n, p in layer.named_parameters() if p.requires_grad}
    device = next(layer.parameters()).device
    generator = torch.Generator(device=device).manual_seed(draw)
    shape = (sequences.rows, sequences.length, _width(block))
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    x = (size * x).to(dtype)
    along = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    options = _options(block, sequences, angles, dtype)

    def computed(fused: bool, turn: _Turn) -> dict[str, Tensor | None]:
        """The output, and the gradients of ``turn``."""
        given = x.clone()
        compared: dict[str, Tensor] = dict(turn.parameters)
        if turn.of_input:
            compared[_INPUT] = given.requires_grad_()
        with (
            parts.high_precision(),
            _training(layer),
            _all_weights_kept(block),
            _same_random_numbers(layer, device),
            _frozen(p for name, p in parameters.items() if name not in turn.parameters),
            in_dtype(read_by_gemms(layer, turn.parameters.values()), dtype),
            sketched_gradients(compared) as gradients,
        ):
            if fused:
                output = block(given, sequences, options)
            else:
                output = _plain(layer, given, options)
            output = output[0] if isinstance(output, tuple) else output
            # Behind a norm the sum cannot be taken apart again.
            added = output if isinstance(block.layout, PostNorm) else output - given
            torch.autograd.grad(
                added, list(compared.values()), along.to(added.dtype), allow_unused=True
            )
        return {_OUTPUT: added.detach()} | {name: gradients.get(name) for name in compared}

    own = computed(False, _Turn(parameters, of_input=True))
    other: dict[str, Tensor | None] = {}
    for turn in _turns(block, parameters):
        # Of the output the first, for which most is computed.
        other = computed(True, turn) | other
    own, other = _joined_biases(block, own), _joined_biases(block, other)
    return {name: _relative(own[name], other[name]) for name in own}


@dataclass(frozen=True)
class _Turn:
    """What gradients are taken of at once."""

    parameters: dict[str, nn.Parameter]
    of_input: bool = False


def _turns(block: FusedBlock, parameters: dict[str, nn.Parameter]) -> list[_Turn]:
    """``parameters`` and the input in the parts whose gradients are taken one after another.

    One module for a whole MLP gives the gradients of all its weights at once, each beside what the
    other GEMM and those of attention keep for the way back. A bias goes with its weight: where that
    is frozen Transformer Engine's modules give it no gradient.
    """
    if block.mlp is None or not block.mlp.whole:
        return [_Turn(parameters, of_input=True)]
    half = block.mlp.half
    turns = [
        {name: p for name, p in parameters.items() if any(p is own for own in owned)}
        for owned in (
            [tensor for linear in linears for tensor in (linear.parameter, linear.bias)]
            for linears in (half.inputs, [half.down])
        )
    ]
    of_mlp = {name for turn in turns for name in turn}
    others = {name: p for name, p in parameters.items() if name not in of_mlp}
    return [_Turn(others, of_input=True), *(_Turn(turn) for turn in turns if turn)]


def _plain(layer: Any, given: Tensor, options: dict[str, Any]) -> Any:
    try:
        return layer(given, **options)
    except torch.OutOfMemoryError:
        raise
    # Attention that is not known may want other arguments, and fail in its own way.
    except Exception as error:
        raise _Incomparable(_told(error)) from error


def _joined_biases(block: FusedBlock, found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """``found``, with the gradients of the biases of q, k and v as one.

    Without rotation a bias of k adds the same to all scores of a token, and its gradient is zero
    but for rounding.
    """
    if not isinstance(block.layout, PostNorm):
        return found  # Llama's are rotated, and GPT-2's are one Parameter
    begin = f"{_GRADIENT}{block.layout.attention}."
    taken = [key for key in found if key.startswith(begin) and key.endswith(".bias")]
    biases = [bias for key in taken if (bias := found.pop(key)) is not None]
    if biases:
        found[f"{_GRADIENT}the biases of q, k and v"] = torch.cat(biases)
    return found


def _options(
    block: FusedBlock, sequences: Sequences, angles: RotaryAngles | None, dtype: torch.dtype
) -> dict[str, Any]:
    """What a transformers model hands to its blocks."""
    device = next(block.layer.parameters()).device
    window = block.attention.half.window if block.attention is not None else None
    positions = sequences.positions(device)
    blocked = torch.zeros(1, dtype=dtype, device=device)
    allowed = sequences.mask(device, window, causal=block.causal)
    mask = blocked.expand(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min)
    options: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
    if angles is not None:
        table = angles.upto(sequences.length, device)[positions]
        options["position_embeddings"] = (table.cos().to(dtype), table.sin().to(dtype))
    return options


def _width(block: FusedBlock) -> int:
    half = block.mlp if block.attention is None else block.attention
    assert half is not None
    return half.half.inputs[0].in_features


def _relative(own: Tensor | None, other: Tensor | None) -> float:
    if own is None or other is None:
        return 0.0 if own is other else float("inf")
    dtype = torch.promote_types(own.dtype, torch.float32)
    size = float(torch.linalg.vector_norm(own, dtype=dtype))
    apart = float((own.to(dtype) - other.to(dtype)).norm())
    return apart / size if size else apart


@contextmanager
def _training(layer: nn.Module) -> Iterator[None]:
    """The way that is looked at is that of training."""
    with in_training(layer), torch.enable_grad():
        yield


@contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Without gradients of ``parameters``, all of which have some outside."""
    frozen = list(parameters)
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def _all_weights_kept(block: FusedBlock) -> Iterator[None]:
    dropout = None if block.attention is None else block.attention.half.dropout
    if dropout is None:
        yield
        return
    before, dropout.p = dropout.p, 0.0
    try:
        yield
    finally:
        dropout.p = before


@contextmanager
def _same_random_numbers(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """So that what is not fused drops the same out on both ways.

    Each dropout begins with numbers of its own: kernels of attention draw some that use none.
    """
    modules = [module for module in layer.modules() if isinstance(module, nn.Dropout)]
    places = {module: place for place, module in enumerate(modules, 1)}

    def begin(module: nn.Module, _: Any) -> None:
        torch.manual_seed(places[module])  # type: ignore[index]

    exits = [module.register_forward_pre_hook(begin) for module in modules]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        for leave in exits:
            leave.remove()
