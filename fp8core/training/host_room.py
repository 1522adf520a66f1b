"""One block of the host's memory that holds many tensors, page-locked where a GPU writes into it.

PyTorch's own page-locked memory comes in powers of two for each tensor, up to twice what is asked
for, and is not given back. This block is as large as its tensors, and ends with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostRoom", "bytes_of_room"]

# Each tensor begins at a multiple of so many bytes: a cache line, and any element's size.
_ALIGNMENT = 64

# Tensors by file stem, then by name.
_Named = Mapping[str, Mapping[str, Tensor]]
_Layout = list[tuple[str, str, torch.Size, torch.dtype]]


class HostRoom:
    """Memory for tensors of the same names, shapes and dtypes as ``tensors``.

    ``places`` holds them, contiguous and uninitialised, by file stem and name. Raises
    ``MemoryError`` or ``RuntimeError`` where there is no such memory, or it cannot be page-locked.
    """

    def __init__(self, tensors: _Named) -> None:
        self._layout = _layout_of(tensors)
        size = bytes_of_room(tensors)
        try:
            # Private and anonymous: whole pages of its own, of no file.
            block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{size} bytes: {error}") from error
        self.places: dict[str, dict[str, Tensor]] = {stem: {} for stem in tensors}
        begin = 0
        for stem, name, shape, dtype in self._layout:
            count = shape.numel() * dtype.itemsize
            place = torch.empty(shape, dtype=dtype)
            if count:
                of_block = torch.frombuffer(block, dtype=torch.uint8, count=count, offset=begin)
                place = of_block.view(dtype).view(shape)
            self.places[stem][name] = place
            begin += _aligned(count)
        # The GPU's writes into the block, to be waited for before it is unlocked.
        self.writes: list[torch.cuda.Event] = []
        devices = [t.device for named in tensors.values() for t in named.values() if t.is_cuda]
        if devices and size:
            address = ctypes.addressof(ctypes.c_char.from_buffer(block))
            _page_lock(address, size, devices[0])
            # Not at the end of the process, which gives everything back anyway.
            weakref.finalize(self, _unlock, address, block, self.writes).atexit = False

    def fits(self, tensors: _Named) -> bool:
        """Whether ``tensors`` have the names, shapes and dtypes that this was made for."""
        return self._layout == _layout_of(tensors)


def bytes_of_room(tensors: _Named) -> int:
    """The size of the block for ``tensors``."""
    return sum(_aligned(t.nbytes) for named in tensors.values() for t in named.values())


def _layout_of(tensors: _Named) -> _Layout:
    return [
        (stem, name, tensor.shape, tensor.dtype)
        for stem, named in tensors.items()
        for name, tensor in named.items()
    ]


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _page_lock(address: int, size: int, device: torch.device) -> None:
    runtime: Any = torch.cuda.cudart()
    # 1 is cudaHostRegisterPortable: for all GPUs of the process.
    code = int(runtime.cudaHostRegister(address, size, 1))
    if code:
        # CUDA hands the error to whoever asks next, which would be a kernel of the training.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise RuntimeError(f"{size} bytes cannot be page-locked: CUDA error {code}")


def _unlock(address: int, block: mmap.mmap, writes: list[torch.cuda.Event]) -> None:
    """``block`` is held until here, so that the address is still its own."""
    for event in writes:
        event.synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
