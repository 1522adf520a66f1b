"""The proof of fused blocks, made on a small model of the same class and configuration.

A plan has no weights to prove a block with. But what a block computes does not depend on how wide
it is: a twin of few and narrow layers with random weights is fused as a real model is, in PyTorch's
own operations, and what is refused of the twin would be refused of the model.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8core.fusion.fuse import fuse
from fp8core.fusion.parts import Halves
from fp8core.fusion.plain import PlainParts
from fp8core.fusion.recognise import describe_block, find_blocks

__all__ = ["Refused", "refused_of_twin"]

_LAYERS = 4
_HEADS = 4
_SIZES = {
    "hidden_size": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_LENGTH = 128  # of the rows that the proof compares
_MEASURED = re.compile(r" by \S+ on .*")


@dataclass(frozen=True)
class Refused:
    """What the proof refused of a block: which halves, and why."""

    attention: bool
    mlp: bool
    reasons: tuple[str, ...]

    def take_from(self, halves: Halves) -> None:
        """Gives up what was refused, of the halves that the model's own block has."""
        attention = self.attention and halves.attention is not None
        mlp = self.mlp and halves.mlp is not None
        if attention:
            halves.attention = None
        if mlp:
            halves.mlp = None
        if attention or mlp:
            halves.reasons += self.reasons


def refused_of_twin(model: Any, blocks: Sequence[tuple[str, nn.Module]]) -> dict[str, Refused]:
    """By the name of each of ``blocks`` of ``model``, which lies on the meta device.

    A block beyond the twin's few is judged by one that is like it. Without those that nothing is
    known of: where no twin can be built and called.
    """
    found: dict[str, Refused] = {}
    # Heads as wide as the model's, or as hidden_size has them: classes go by the one or the other.
    for head_dim in (None, _SIZES["hidden_size"] // _HEADS):
        try:
            with _random_numbers_of_its_own(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _of_twin(_twin(model, head_dim))
            break
        except torch.OutOfMemoryError:
            raise
        # Each class fails in its own way on sizes that it was not made for.
        except Exception:
            continue
    by_kind = {_kind(layer): found[name] for name, layer in blocks if name in found}
    return {
        name: by_kind[_kind(layer)] for name, layer in blocks if _kind(layer) in by_kind
    } | found


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Blocks of which this is equal compute the same, but for their weights and windows."""
    return type(layer), *(type(child) for child in layer.children())


def _of_twin(twin: Any) -> dict[str, Refused]:
    with torch.no_grad():
        twin(input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=False)  # or raises
    described = {
        name: describe_block(name, layer, twin.config) for name, layer in find_blocks(twin)
    }
    found = {}
    for row in fuse(twin, PlainParts(), {}, length=_LENGTH).rows:
        halves = described[row.name]
        attention, mlp = (
            half is not None and half.name not in row.fused
            for half in (halves.attention, halves.mlp)
        )
        known = [_apart(reason, row.name) for reason in halves.reasons]
        told = [_apart(reason, row.name) for reason in (row.reason or "").split("; ") if reason]
        reasons = tuple(reason for reason in told if reason not in known)
        found[row.name] = Refused(attention, mlp, reasons)
    return found


def _apart(reason: str, name: str) -> str:
    """Without what differs from block to block."""
    return _MEASURED.sub("", reason.replace(f"{name}.", ""))


def _twin(model: Any, head_dim: int | None) -> Any:
    config = copy.deepcopy(model.config)
    layers = config.num_hidden_layers
    kept = min(layers, _LAYERS)
    for key, value in vars(config).items():
        # One entry for each layer.
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, key, value[:kept])
    config.num_hidden_layers = kept
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None)
    config.num_attention_heads = _HEADS
    if isinstance(groups, int):
        config.num_key_value_heads = _HEADS if groups == heads else 1 if groups == 1 else 2
    for key, size in _SIZES.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, size)
    if head_dim is not None:
        config.head_dim = head_dim
    for key in _TOKENS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 0)
    twin: Any = type(model)._from_config(
        config, dtype=torch.float32, attn_implementation=model.config._attn_implementation
    )
    with torch.no_grad():
        for parameter in twin.parameters():
            # Large enough that each part of a block shows in its output.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.uniform_(0.3, 1.5)
    return twin.train()


@contextmanager
def _random_numbers_of_its_own() -> Iterator[None]:
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        yield
