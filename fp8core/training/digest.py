"""A digest of tensors, to tell two models apart that should be the same to the bit.

It is compared between ranks, before training and with every checkpoint, and between a checkpoint of
adapters and the base model that it is resumed on. It rests on sums of 64-bit words, each mixed and
weighted by its place: quick on any device, the same on all of them, for sums of integers do not
depend on their order. Numbers that only changed places give another digest. It guards against
accidents; who wants two models of one digest can make them.

``digest_of_sums`` is what earlier versions wrote into checkpoints of adapters. It does not see
numbers that only changed places within a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["digest", "digest_of_sums"]

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words that share one row of weights; part of what the digest is.
_ROW = 1 << 15
# Rows at a time: on a CPU what fits its cache, on a GPU what costs no memory to speak of.
_ROWS_AT_ONCE = {"cpu": 8, "cuda": 256}
# Odd, with bits like dice: multiplying by them spreads a word over its upper half.
_FIRST, _SECOND = -7046029254386353131, -4417276706812531889
_LOWER_HALF = (1 << 32) - 1


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of the bits of every tensor and of their places: the same on any device."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(_sums(_words(tensor)))
    return found.hexdigest()


def digest_of_sums(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of sums of the bits of every tensor, as whole numbers."""
    found = hashlib.sha256()
    for name, tensor in named:
        bits = tensor.detach().contiguous().view(_WHOLE_NUMBERS[tensor.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
    return found.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as whole rows of 64-bit words, with zeros at the end."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -octets.numel() % 8
    if missing:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    elif octets.storage_offset() % 8:  # a part of another tensor
        octets = octets.clone()
    return octets.view(torch.int64)


def _sums(words: Tensor) -> bytes:
    """A sum for each row of words, the last of which may be shorter."""
    weights = _weights(words.device)
    step = _ROW * _ROWS_AT_ONCE.get(words.device.type, 8)
    totals = []
    for begin in range(0, words.numel(), step):
        piece = words[begin : begin + step]
        whole = piece.numel() // _ROW * _ROW
        if whole:
            totals.append((_mixed(piece[:whole].view(-1, _ROW)) * weights).sum(dim=1))
        if whole < piece.numel():
            rest = piece[whole:]
            totals.append((_mixed(rest) * weights[: rest.numel()]).sum().reshape(1))
    if not totals:
        return b""
    return torch.cat(totals).cpu().numpy().astype("<i8").tobytes()


def _mixed(words: Tensor) -> Tensor:
    """Each word with its upper half spread over the lower: else the last bits, of which numbers
    that are round in binary have none, would not tell their places."""
    spread = words * _FIRST
    return spread.bitwise_xor_((spread >> 32).bitwise_and_(_LOWER_HALF))


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    places = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device)
    return _mixed(_mixed(places) * _SECOND) | 1
