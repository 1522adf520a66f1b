"""Sizes that a Hugging Face configuration may name, and how large they may be.

The bounds lie far above every model there is. What is above them is a slip of the pen, and would
only be found on a node, when its memory or its time is used up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8core.spec.document import kind_of
from fp8core.spec.problems import Problem, pointer_of

# What they are called by the model types of transformers, and the largest value of each.
_BY_BOUND: dict[int, tuple[str, ...]] = {
    10_000: (
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"),
        *("decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_local_experts"),
        *("num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    ),
    65_536: (
        *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"),
        *("head_dim", "d_kv", "encoder_attention_heads", "decoder_attention_heads"),
    ),
    2**20: ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "hidden_dim"),
    2**22: (
        *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"),
    ),
    2**24: ("vocab_size",),
    2**28: ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"),
}
LARGEST_SIZES = {name: bound for bound, names in _BY_BOUND.items() for name in names}
# All weights of a model together; the largest that were ever trained have a tenth of it.
MOST_WEIGHTS = 10**13


def size_schema() -> dict[str, Any]:
    """The JSON schemas of the sizes, by their names."""
    return {
        name: {"type": ["integer", "null"], "minimum": 1, "maximum": bound}
        for name, bound in LARGEST_SIZES.items()
    }


def impossible_sizes(config: dict[str, Any], at: tuple[str, ...]) -> Iterator[Problem]:
    """What no model can have, one by one or all together; `at` is where the configuration is."""
    found = list(_sizes(config, at))
    yield from found
    if not found and (weights := _weights_of(config)) > MOST_WEIGHTS:
        message = f"a model of these sizes has about {weights:.1e} weights; {MOST_WEIGHTS:.0e} are"
        yield Problem(pointer_of(at), f"{message} the most", "out_of_range")


def _sizes(config: dict[str, Any], at: tuple[str, ...]) -> Iterator[Problem]:
    """The sizes of a configuration, and of those inside it, that no model can have."""
    for name, value in config.items():
        path = (*at, name)
        if isinstance(value, dict):
            yield from _sizes(value, path)
        elif name in LARGEST_SIZES:
            for size in value if isinstance(value, list) else [value]:
                problem = _problem(path, size, LARGEST_SIZES[name])
                if problem is not None:
                    yield problem
                    break


def _problem(path: tuple[str, ...], size: Any, largest: int) -> Problem | None:
    if size is None or isinstance(size, str | bool | list | dict):
        return None  # whether its type means something there, transformers knows
    if not isinstance(size, int):
        message = f"must be a whole number, not {kind_of(size)}"
        return Problem(pointer_of(path), message, "wrong_type")
    if not 1 <= size <= largest:
        message = f"must be from 1 to {largest}, not {kind_of(size).removeprefix('the number ')}"
        return Problem(pointer_of(path), message, "out_of_range")
    return None


def _weights_of(config: dict[str, Any]) -> int:
    """About how many weights the matrices of a transformer of these sizes have; 0 if it does not
    say enough."""

    def size(*names: str) -> int:
        values = (config.get(name) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), 0)

    hidden = size("hidden_size", "n_embd", "d_model", "dim")
    layers = size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    inner = size("intermediate_size", "n_inner", "d_ff", "ffn_dim") or 4 * hidden
    experts = size("num_local_experts", "num_experts", "n_routed_experts") or 1
    positions = size("n_positions", "n_ctx")  # learned ones; others take no weights
    per_layer = 2 * hidden * hidden + 2 * hidden * inner * experts
    return layers * per_layer + hidden * (size("vocab_size") + positions)
