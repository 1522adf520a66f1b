"""The safetensors files of a checkpoint folder: checked whole before a weight is read.

Tensors are read one by one with plain reads, straight to where they go. A memory map would count
every page of the file beside the copy in the target dtype, and would die (SIGBUS) or change under
training if somebody rewrote the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8core.errors import ModelUnavailable
from fp8core.models.source import ModelSource, read_json

__all__ = ["StoredTensor", "stored_tensors"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, read when it is indexed (``stored[...]``), as transformers does."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self.file, framework="pt", device="cpu", backend="pread") as opened:
            tensor: Tensor = opened.get_tensor(self.key)
        return tensor if index is Ellipsis else tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype


def stored_tensors(source: ModelSource) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its key; no tensor is read.

    Raises ``ModelUnavailable``, naming the file, for pickled weights, a missing or truncated shard,
    a header that does not fit its file, an index that disagrees with its shards, and weights in a
    format that is not a floating-point number of 16 bits or more.
    """
    assert source.folder is not None
    if (source.folder / _SINGLE).is_file():
        tensors = _tensors_of(source, _SINGLE)
    elif (source.folder / _INDEX).is_file():
        tensors = _tensors_of_shards(source)
    else:
        _refuse_without_safetensors(source)
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATING and (
            key.endswith((".weight", ".bias")) or not _is_integer(tensor.dtype)
        ):
            raise _bad(
                source, tensor.file.name, f"{key} is stored as {tensor.dtype}, no trainable format"
            )
    return tensors


def _tensors_of_shards(source: ModelSource) -> dict[str, StoredTensor]:
    index = read_json(source.file(_INDEX), source.label)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(source, _INDEX, "it has no weight_map")
    for name in weight_map.values():
        # A name with a folder in it would lead out of the checkpoint.
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise _bad(source, _INDEX, f"{name!r} is no safetensors file of the same folder")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        assert source.folder is not None
        if not (source.folder / name).is_file():
            raise _bad(source, name, "the index names this shard, and it is not there")
        shard = _tensors_of(source, name)
        for key in (key for key, file in weight_map.items() if file == name):
            if key not in shard:
                raise _bad(source, name, f"the index says that it holds {key}, and it does not")
            tensors[key] = shard[key]
    return tensors


def _tensors_of(source: ModelSource, name: str) -> dict[str, StoredTensor]:
    path = source.file(name)
    tensors: dict[str, StoredTensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as opened:
            for key in opened.keys():  # noqa: SIM118  # a method, not a mapping's
                stored = opened.get_slice(key)
                shape = tuple(stored.get_shape())
                tensors[key] = StoredTensor(path, key, stored.get_dtype(), shape)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise _bad(source, name, f"it is truncated or damaged: {error}") from error
    if not tensors:
        raise _bad(source, name, "it holds no tensor")
    return tensors


def _refuse_without_safetensors(source: ModelSource) -> None:
    assert source.folder is not None
    pickles = sorted(p.name for pattern in _PICKLES for p in source.folder.glob(pattern))
    if pickles:
        raise _bad(
            source,
            pickles[0],
            "pickled weights can run code when they are read and are refused; "
            "save the model as safetensors",
        )
    raise ModelUnavailable(
        f"{source.label} has neither {_SINGLE} nor {_INDEX}", pointer=source.pointer
    )


def _is_integer(dtype: str) -> bool:
    return dtype == "BOOL" or (dtype[0] in "IU" and dtype[1:].isdigit())


def _bad(source: ModelSource, file: str, what: str) -> ModelUnavailable:
    return ModelUnavailable(f"{file} of {source.label}: {what}", pointer=source.pointer)
