"""Matrices in the dtype they are computed in, for as long as gradients are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8core.conversion.find import is_conv1d
from fp8core.fusion.joined import lie_together

__all__ = ["in_dtype", "read_by_gemms"]


def read_by_gemms(layer: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Those of ``parameters`` that ``layer`` holds as weights of Linears and in no other way.

    What else a module of the model's own does with a matrix may need the dtype that it has.
    """
    weights: set[int] = set()
    others: set[int] = set()
    for module in layer.modules():
        linear = type(module) is nn.Linear or is_conv1d(module)
        for key, parameter in module._parameters.items():
            (weights if linear and key == "weight" else others).add(id(parameter))
    return (one for one in parameters if id(one) in weights - others)


@contextmanager
def in_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Within it the matrices among ``parameters`` that are in fp32 hold their values in ``dtype``.

    A GEMM casts such a matrix first, and its gradient after; here both are as large as the cast,
    half of it in bf16, and the numbers are those that the GEMM reads and writes anyway. What lies
    together in memory does so in ``dtype`` too. Afterwards the Parameters hold what they held.
    """
    matrices = [
        parameter
        for parameter in dict.fromkeys(parameters)
        if parameter.dtype == torch.float32 and parameter.dim() > 1
    ]
    if dtype.itemsize >= torch.float32.itemsize:
        matrices = []
    held = {parameter: parameter.data for parameter in matrices}
    try:
        for neighbours in _neighbours(held):
            for parameter, cast in _cast(neighbours, held, dtype):
                parameter.data = cast
        yield
    finally:
        for parameter, values in held.items():
            parameter.data = values


def _neighbours(held: dict[nn.Parameter, Tensor]) -> Iterator[list[nn.Parameter]]:
    """All of them, those together whose values follow one another in memory."""
    together: list[nn.Parameter] = []
    for parameter in sorted(held, key=lambda one: held[one].data_ptr()):
        if together and not lie_together([held[one] for one in (*together, parameter)]):
            yield together
            together = []
        together.append(parameter)
    if together:
        yield together


def _cast(
    together: list[nn.Parameter], held: dict[nn.Parameter, Tensor], dtype: torch.dtype
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    if len(together) == 1:
        yield together[0], held[together[0]].to(dtype)
        return
    first = held[together[0]]
    rows = sum(held[parameter].shape[0] for parameter in together)
    cast = first.as_strided((rows, *first.shape[1:]), first.stride()).to(dtype)
    begin = 0
    for parameter in together:
        end = begin + parameter.shape[0]
        yield parameter, cast[begin:end]
        begin = end
