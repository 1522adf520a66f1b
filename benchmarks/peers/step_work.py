"""What a training step cannot do without: the products, attention and update that it is made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from peers.shapes import Shape

__all__ = ["Attention", "Product", "StepWork", "adapter_step", "encoder_step", "llama_step"]

_READ_AND_WRITTEN = 7
"""By AdamW, of a parameter: weight, gradient and two moments are read, all but the gradient
written."""


@dataclass(frozen=True)
class Product:
    """A GEMM of [rows, inner] by [inner, columns], ``count`` times in a step.

    ``bf16``: never in FP8, whatever the other GEMMs are in.
    """

    rows: int
    inner: int
    columns: int
    count: int
    backward: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class Attention:
    """Of one layer, forward and backward, ``count`` times in a step."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    count: int
    causal: bool


@dataclass(frozen=True)
class StepWork:
    """``updated_bytes``: what updating the parameters reads and writes."""

    products: tuple[Product, ...]
    attention: Attention
    updated_bytes: int


def llama_step(
    shape: Shape, rows: int, length: int, bytes_each: int, documents: Sequence[int] = ()
) -> StepWork:
    """A Llama, all of it trained: weights, gradients and moments of ``bytes_each``, and the
    gradients read once more for their norm.

    ``documents``: the tokens of each where they are shorter than rows, in one step or in several;
    see `_within`.
    """
    tokens = rows * length
    layers = [*_llama_layers(shape, shape.layers), (shape.vocabulary, shape.hidden, 1)]
    products = [product for layer in layers for product in _trained(tokens, *layer)]
    parameters = sum(outputs * inputs * count for outputs, inputs, count in layers)
    if not shape.tied:
        parameters += shape.vocabulary * shape.hidden
    attention = _llama_attention(shape, rows, length)
    return StepWork(
        tuple(products),
        _within(documents, attention) if documents else attention,
        parameters * (_READ_AND_WRITTEN + 1) * bytes_each,
    )


def adapter_step(
    shape: Shape, adapted: Collection[str], rank: int, rows: int, length: int
) -> StepWork:
    """LoRA around the ``adapted`` of a frozen Llama's Linears, as q_proj; adapters in fp32.

    No weight of the base has a gradient, and nothing in front of the first block has one. The
    adapters' GEMMs are in bf16, those down to the rank one for all that read the same input.
    """
    tokens, kv_width = rows * length, shape.hidden // shape.heads * shape.kv_heads
    hidden, mlp = shape.hidden, shape.mlp
    readers = (  # of the same input: its width, and their outputs by name
        (hidden, {"q_proj": hidden, "k_proj": kv_width, "v_proj": kv_width}),
        (hidden, {"o_proj": hidden}),
        (hidden, {"gate_proj": mlp, "up_proj": mlp}),
        (mlp, {"down_proj": hidden}),
    )
    head = (tokens, hidden, shape.vocabulary)
    products = [Product(*head, 1), Product(tokens, shape.vocabulary, hidden, 1, backward=True)]
    parameters = 0
    for number, (inputs, outputs) in enumerate(readers):
        count, behind = shape.layers, shape.layers - (number == 0)
        joined = sum(outputs.values())
        products += [
            Product(tokens, inputs, joined, count),
            Product(tokens, joined, inputs, behind, backward=True),
        ]
        around = {name: width for name, width in outputs.items() if name in adapted}
        if around:
            down = _trained(tokens, rank * len(around), inputs, count, behind, bf16=True)
            ups = [_trained(tokens, width, rank, count, bf16=True) for width in around.values()]
            products += [product for layer in (down, *ups) for product in layer]
        parameters += count * sum(rank * (inputs + width) for width in around.values())
    attention = _llama_attention(shape, rows, length)
    return StepWork(tuple(products), attention, parameters * _READ_AND_WRITTEN * 4)


def encoder_step(
    shape: Shape, rows: int, length: int, documents: Sequence[int], parameters: int
) -> StepWork:
    """BERT with a masked-LM head on all tokens, stored in fp32; gradients are not clipped.

    ``documents``: the tokens of each; see `_within`.
    """
    tokens, hidden, mlp = rows * length, shape.hidden, shape.mlp
    each, once = shape.layers, 1
    layers = [
        (3 * hidden, hidden, each),
        (hidden, hidden, each),
        (mlp, hidden, each),
        (hidden, mlp, each),
        (hidden, hidden, once),
    ]
    products = [product for layer in layers for product in _trained(tokens, *layer)]
    # FP8 GEMMs are of multiples of 16, which this vocabulary may not be.
    products += _trained(tokens, shape.vocabulary, hidden, once, bf16=shape.vocabulary % 16 > 0)
    head_dim = hidden // shape.heads
    rowwise = Attention(rows, length, shape.heads, shape.kv_heads, head_dim, each, causal=False)
    return StepWork(
        tuple(products), _within(documents, rowwise), parameters * _READ_AND_WRITTEN * 4
    )


def _llama_layers(shape: Shape, count: int) -> Iterator[tuple[int, int, int]]:
    """Outputs, inputs and how often, those that read the same input as one."""
    joined = shape.hidden + 2 * (shape.hidden // shape.heads) * shape.kv_heads
    yield joined, shape.hidden, count
    yield shape.hidden, shape.hidden, count
    yield 2 * shape.mlp, shape.hidden, count
    yield shape.hidden, shape.mlp, count


def _llama_attention(shape: Shape, rows: int, length: int) -> Attention:
    head_dim = shape.hidden // shape.heads
    return Attention(rows, length, shape.heads, shape.kv_heads, head_dim, shape.layers, causal=True)


def _within(documents: Sequence[int], rowwise: Attention) -> Attention:
    """Attention within ``documents``: taken as rows cut into documents of one length, as many as
    have no more products than those given."""
    squares = sum(tokens**2 for tokens in documents)
    pieces = math.ceil(rowwise.length * sum(documents) / squares)
    return replace(rowwise, rows=rowwise.rows * pieces, length=rowwise.length // pieces)


def _trained(
    tokens: int,
    outputs: int,
    inputs: int,
    count: int,
    behind: int | None = None,
    *,
    bf16: bool = False,
) -> list[Product]:
    """Forward, gradient of the input, gradient of the weight; ``behind``: how many of the
    inputs have a gradient, where not all."""
    return [
        Product(tokens, inputs, outputs, count, bf16=bf16),
        Product(
            tokens,
            outputs,
            inputs,
            count if behind is None else behind,
            backward=True,
            bf16=bf16,
        ),
        Product(outputs, tokens, inputs, count, backward=True, bf16=bf16),
    ]
