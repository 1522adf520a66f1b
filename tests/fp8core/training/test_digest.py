"""The digest of tensors: what it sees, and on what it does not depend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8core.training.digest import digest, digest_of_sums

ROW = 1 << 15


def of(tensor: Tensor) -> str:
    return digest([("w", tensor)])


def swapped(tensor: Tensor, one: int, other: int) -> Tensor:
    flat = tensor.clone().reshape(-1)
    flat[[one, other]] = flat[[other, one]]
    return flat.reshape(tensor.shape)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("size", [2, 7, 1000, ROW * 9 + 5])
def test_any_two_that_change_places_are_seen(dtype: torch.dtype, size: int) -> None:
    """Round numbers, whose last bits are all zero, too."""
    generator = torch.Generator().manual_seed(size)
    values = torch.tensor([1.0, 2.0, -1.0, -2.0, 4.0, 0.0])
    tensor = values[torch.randint(0, 6, (size,), generator=generator)].to(dtype)
    tensor[0], tensor[-1] = 1, 2
    seen = of(tensor)
    assert of(tensor.clone()) == seen
    as_bytes = tensor.view(torch.uint8).reshape(size, -1)
    for _ in range(60):
        one, other = torch.randint(0, size, (2,), generator=generator).tolist()
        if torch.equal(as_bytes[one], as_bytes[other]):
            one, other = 0, size - 1
        changed = as_bytes.clone()
        changed[[one, other]] = changed[[other, one]]
        assert of(changed.reshape(-1).view(dtype)) != seen
        assert digest_of_sums([("w", changed.reshape(-1).view(dtype))]) == digest_of_sums(
            [("w", tensor)]
        )


@pytest.mark.parametrize("pattern", [[1.0, 1.0, 2.0, 2.0], [1.0, 2.0], [0.0, -0.0, 0.0, 0.0]])
def test_blocks_that_change_places_are_seen(pattern: list[float]) -> None:
    """Whole words, rows and halves of a tensor; pairs that are alike in both halves of a word."""
    tensor = torch.tensor(pattern).repeat(4 * ROW // len(pattern))
    tensor[: len(tensor) // 3] *= 4
    tensor[1] = -tensor[1] + 1
    seen = {of(tensor)}
    blocks = (2, 64, 2 * ROW)
    for block in blocks:
        parts = list(torch.split(tensor, block))
        parts[0], parts[-1] = parts[-1], parts[0]
        seen.add(of(torch.cat(parts)))
    seen.add(of(tensor.flip(0)))
    seen.add(of(tensor.reshape(2, -1).T.contiguous().reshape(-1)))
    assert len(seen) == len(blocks) + 3


def test_bits_shapes_and_names_are_seen_and_layouts_are_not() -> None:
    tensor = torch.randn(64, 33)
    seen = of(tensor)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[63, 32] ^= 1
    others = [of(one_bit), of(tensor.reshape(33, 64)), of(-tensor), digest([("v", tensor)])]
    assert seen not in others
    assert of(torch.zeros(3)) != of(torch.zeros(4))
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(tensor.T.contiguous().T) == seen
    padded = torch.zeros(64 * 33 + 1)
    padded[1:] = tensor.reshape(-1)
    assert of(padded[1:].reshape(64, 33)) == seen
    assert of(torch.empty(0)) != of(torch.empty(0, 2))
    assert of(torch.tensor(1.5)) != of(torch.tensor(2.5))


def test_it_is_the_same_in_every_version() -> None:
    """Ranks may compare theirs only with their own; checkpoints of adapters keep them."""
    tensor = (torch.arange(ROW + 77) % 251).to(torch.int16)
    assert of(tensor) == "0e7797200e25754be6d3d486e407073df8783ecf882711da548a86a90dee77c4"
