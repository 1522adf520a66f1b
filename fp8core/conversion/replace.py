"""Exchanging one module for another without losing anything that hung on it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fp8core.conversion.norms import HOOK_ATTRIBUTES
from fp8core.conversion.report import Replacement

__all__ = ["put_in_place", "take_over"]


def take_over(name: str, original: nn.Module, replacement: nn.Module) -> Replacement:
    """Make ``replacement`` stand for ``original``: training mode, hooks, buffers, attributes.

    The two share their hook dictionaries from now on, so that a handle made before the exchange
    still removes its hook, and a hook added after it is still there after ``restore``.

    Raises RuntimeError where the replacement does not hold the very Parameters of the original.
    """
    parameters = {key: value for key, value in original._parameters.items() if value is not None}
    for key, parameter in parameters.items():
        if replacement._parameters.get(key) is not parameter:
            raise RuntimeError(
                f"{type(replacement).__name__} for {name!r} does not hold the same Parameter "
                f"{key!r} as the {type(original).__name__} it stands for"
            )
    replacement.train(original.training)
    carried = _carry_buffers(original, replacement)
    _carry_attributes(original, replacement)
    own_hooks = _share_hooks(original, replacement)
    for key in parameters:
        original._parameters[key] = None
    return Replacement(
        name=name,
        original=original,
        replacement=replacement,
        parameter_names=tuple(parameters),
        buffer_names=carried,
        own_hooks=own_hooks,
    )


def put_in_place(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put ``new`` wherever ``old`` stands in ``model``; gives the model (``new`` for the root).

    A place keeps its position among its siblings.
    """
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
    return new if model is old else model


def _carry_buffers(original: nn.Module, replacement: nn.Module) -> tuple[str, ...]:
    carried = []
    for key, buffer in original._buffers.items():
        if key in replacement._buffers or hasattr(replacement, key):
            raise RuntimeError(f"the buffer {key!r} has no place in {type(replacement).__name__}")
        replacement.register_buffer(
            key, buffer, persistent=key not in original._non_persistent_buffers_set
        )
        carried.append(key)
    return tuple(carried)


def _carry_attributes(original: nn.Module, replacement: nn.Module) -> None:
    """What somebody set on the module, such as a tag, goes along; what the class has stays."""
    for key, value in original.__dict__.items():
        if key not in replacement.__dict__ and not hasattr(type(replacement), key):
            replacement.__dict__[key] = value


def _share_hooks(original: nn.Module, replacement: nn.Module) -> dict[str, tuple[int, ...]]:
    own: dict[str, tuple[int, ...]] = {}
    for attribute in HOOK_ATTRIBUTES:
        theirs: Any = replacement.__dict__[attribute]
        shared: Any = original.__dict__[attribute]
        if theirs:
            own[attribute] = tuple(theirs)
            shared.update(theirs)
            # The replacement's own come first: to the hooks of others they are part of the layer.
            for key in reversed(tuple(theirs)):
                shared.move_to_end(key, last=False)
        replacement.__dict__[attribute] = shared
    if original._backward_hooks:
        replacement._is_full_backward_hook = original._is_full_backward_hook
    _rebind_load_hooks(original, replacement)
    return own


def _rebind_load_hooks(old: nn.Module, new: nn.Module) -> None:
    """Loading hooks that get the module hold a weak reference to it; point it at ``new``."""
    for attribute in ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"):
        for hook in new.__dict__[attribute].values():
            holder = getattr(hook, "module", None)
            if isinstance(holder, weakref.ref) and holder() is old:
                hook.module = weakref.ref(new)
