"""Attention in FP8 by Transformer Engine: where it can be had, and its scales and amax histories.

They are of six tensors, in columns of their own among those that three GEMMs would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8core.engines.te_state import DirectionState

__all__ = [
    "ATTENTION_COLUMNS",
    "attention_obstacles",
    "attention_states",
    "attention_tensors",
    "begin_attention",
]

ATTENTION_COLUMNS = {
    "forward": {"qkv": 2, "output": 3, "probabilities": 8},
    "backward": {"grad_qkv": 0, "grad_output": 3, "grad_probabilities": 5},
}
"""Where Transformer Engine (``META_QKV`` and so on) keeps each tensor's scale, by direction."""

_GEMMS = 3


_OWN_ANSWERS = {"NVTE_FP8_DPA_BWD": "1", "NVTE_DPA_FP8_RECIPE": "", "NVTE_FUSED_ATTN": "1"}
"""Variables by which Transformer Engine would compute otherwise than the recipe says."""


def attention_obstacles(
    scaling: str, capability: tuple[int, int], environment: Mapping[str, str]
) -> list[str]:
    """Why no attention can compute in FP8 on a GPU of this compute capability."""
    named = f"{capability[0]}.{capability[1]}"
    obstacles = []
    if capability < (9, 0) or capability >= (12, 0):
        obstacles.append(f"FP8 attention needs compute capability 9.0 to 11.x, not {named}")
    elif scaling == "current" and capability < (10, 0):
        obstacles.append(
            "Transformer Engine has FP8 attention under current scaling from compute capability "
            f"10.0 on; this GPU has {named}, on which delayed scaling has it"
        )
    for variable, neutral in _OWN_ANSWERS.items():
        if environment.get(variable, neutral) != neutral:
            obstacles.append(f"{variable} is set, which takes attention out of the recipe's FP8")
    return obstacles


def attention_states(
    modules: Mapping[str, Any], direction: str
) -> Iterator[tuple[str, DirectionState]]:
    """Of those modules whose state exists; all columns, of which most are used by nobody."""
    key = "scaling_fwd" if direction == "forward" else "scaling_bwd"
    for name, module in modules.items():
        state = module.fp8_meta.get(key)
        if state is not None and getattr(state, "amax_history", None) is not None:
            yield name, DirectionState(state.scale, state.amax_history)


def attention_tensors(
    modules: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, str], DirectionState, int]]:
    """(module, tensor), the state that holds its scale and amaxes, and the column there."""
    for direction, columns in ATTENTION_COLUMNS.items():
        for name, state in attention_states(modules, direction):
            for tensor, column in columns.items():
                yield (name, tensor), state, column


def begin_attention(modules: Mapping[str, Any]) -> None:
    """Makes the state of modules without any, inside of Transformer Engine's context.

    In its exchange of amaxes they take part from now on, all in one order: a rank whose batches
    hold several documents a row might otherwise join later than the others.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for module in modules.values():
        if "scaling_fwd" not in module.fp8_meta:
            module.__dict__["_in_fp8"] = True
            module.init_fp8_metadata(num_gemms=_GEMMS)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
