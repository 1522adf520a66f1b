"""Refuses an engine state that is not this engine's own, before any of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["check_state"]

_SHOWN = 5


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError where names, shapes or dtypes of ``state`` differ from ``expected``."""
    differences = [f"{name} is missing" for name in expected if name not in state]
    differences += [f"{name} is not known here" for name in state if name not in expected]
    for name, own in expected.items():
        given = state.get(name)
        if given is not None and (given.shape, given.dtype) != (own.shape, own.dtype):
            differences.append(f"{name} is {_kind(given)} and should be {_kind(own)}")
    if differences:
        more = len(differences) - _SHOWN
        shown = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            "this engine state belongs to another model or recipe, or to a version that fused "
            f"other blocks: {shown}"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
