"""Named tensors in safetensors files, one shard in host memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8core.durable import told_when_full
from fp8core.errors import StorageFull, TrainingError
from fp8core.spec.outcomes import Reason

__all__ = ["SHARD_BYTES", "read_tensors", "write_tensors"]

SHARD_BYTES = 4 << 30
_FULL_WORDS = ("os error 28", "os error 122")  # ENOSPC and EDQUOT, as safetensors words them


def write_tensors(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes ``stem``.safetensors, or numbered shards and their index in Hugging Face's layout.

    Each file is read once more and compared with what was to be written. Raises ``StorageFull``;
    ``TrainingError`` where a file holds something else. No tensor may share its storage with
    another: ties are the caller's.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        _save(folder / f"{stem}.safetensors", {name: tensors[name] for name in shards[0]})
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(folder / file, {name: tensors[name] for name in names})
        places.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": places,
    }
    path = folder / f"{stem}.safetensors.index.json"
    with told_when_full(path):
        path.write_text(json.dumps(index, indent=1))


def read_tensors(folder: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that ``write_tensors`` wrote, on the CPU, one at a time.

    Raises ``ValueError`` for a file that is missing or is no safetensors file.
    """
    whole = folder / f"{stem}.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not files:
        raise ValueError(f"{whole} is missing")
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 (no mapping)
                    yield name, reader.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}") from error


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        with told_when_full(path):
            # "pt" is what transformers asks for when it loads the file as a checkpoint.
            save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if any(word in str(error) for word in _FULL_WORDS):
            raise StorageFull(f"no room left to write {path}") from error
        raise
    with safe_open(path, framework="pt", device="cpu") as reader:
        for name, tensor in held.items():
            if not _same_bits(reader.get_tensor(name), tensor):
                raise TrainingError(
                    f"{path} does not hold what was written to it: {name} reads back other bytes",
                    reason=Reason.HARDWARE_FAULT,
                )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of numbers that are no numbers."""
    pair = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)
