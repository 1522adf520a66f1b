"""Tensors on their way from a device to the host, for which nobody waits.

Reading a number from a GPU waits until everything before it is computed. A copy to pinned memory
is only one more item of the device's queue, and an event behind it says when it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Landing"]


class Landing:
    """Copies of ``tensors`` in the host's memory, as they are at this point of the device's queue.

    What is on the host already is cloned, unless the tensors are ``fresh``: nobody else's.
    """

    def __init__(self, tensors: Iterable[Tensor], *, fresh: bool = False) -> None:
        self._host: list[Tensor] = []
        devices: set[torch.device] = set()
        for tensor in tensors:
            there = tensor.detach()
            if there.device.type != "cuda":
                there = there.cpu()
                self._host.append(there if fresh else there.clone())
                continue
            host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._host.append(host.copy_(there, non_blocking=True))
            devices.add(there.device)
        self._events: list[torch.cuda.Event] = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    @property
    def arrived(self) -> bool:
        """Whether all copies are complete. Raises what the device has failed with."""
        return all(event.query() for event in self._events)

    def wait(self) -> list[Tensor]:
        """The copies, on the host, complete."""
        for event in self._events:
            event.synchronize()
        return self._host
