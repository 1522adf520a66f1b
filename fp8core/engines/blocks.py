"""The repeated blocks of a model: the units that are compiled, each like the others."""

from __future__ import annotations

from torch import nn

__all__ = ["find_blocks"]


def find_blocks(model: nn.Module, layers: set[int]) -> list[nn.Module]:
    """What to compile so that each module whose id is in ``layers`` is compiled once.

    A block is an element of a ``ModuleList`` that lies in no other (the layers of a decoder or an
    encoder; the experts inside a layer are part of that layer). A layer outside every block, such
    as an output head, stands for itself. In the model's order, each object once.
    """
    found: list[nn.Module] = []
    _collect(model, layers, found, set())
    return found


def _collect(module: nn.Module, layers: set[int], found: list[nn.Module], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in layers:
        found.append(module)
        return
    for child in module.children():
        if not isinstance(module, nn.ModuleList):
            _collect(child, layers, found, seen)
        elif id(child) not in seen and any(id(part) in layers for part in child.modules()):
            seen.update(id(part) for part in child.modules())
            found.append(child)
