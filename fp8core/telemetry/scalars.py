"""Single numbers that lie on a device, taken along without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fp8core.numerics.landing import Landing

__all__ = ["Scalars"]


class Scalars:
    """Copies of tensors of one element each, as they are now; later changes do not reach them.

    Raises ``ValueError`` for a tensor that is not one real number.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
        for name, value in values.items():
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"{name} is a tensor of {value.dtype} {tuple(value.shape)}; a metric is one "
                    "real number"
                )
            names, tensors = groups.setdefault((value.device, value.dtype), ([], []))
            names.append(name)
            tensors.append(value if value.dim() == 0 else value.reshape(()))
        self._names = [names for names, _ in groups.values()]
        # One kernel and one transfer for each device and dtype, not one for each number.
        with torch.no_grad():
            stacked = [torch.stack(tensors) for _, tensors in groups.values()]
        self._landing = Landing(stacked, fresh=True)

    @property
    def arrived(self) -> bool:
        """Whether the device has computed and sent them. Raises what the device has failed with."""
        return self._landing.arrived

    def read(self) -> dict[str, float]:
        """The numbers, waiting for the device where they have not arrived."""
        return {
            name: float(value)
            for names, tensor in zip(self._names, self._landing.wait(), strict=True)
            for name, value in zip(names, tensor.tolist(), strict=True)
        }
