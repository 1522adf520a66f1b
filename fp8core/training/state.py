"""What a checkpoint holds, taken from a run and put back into one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import Engine
from fp8core.errors import CheckpointCorrupt
from fp8core.training import random_state
from fp8core.training.checkpoint import LoadedCheckpoint
from fp8core.training.optimizer import AdamW
from fp8core.training.position import Position

__all__ = ["ResumableData", "capture_state", "capture_tensors", "model_tensors", "restore"]


class ResumableData(Protocol):
    """The source of training batches, as far as a checkpoint is concerned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and persistent buffers by name; tied ones once, under the first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue  # an engine's extra state, which the engine saves itself
        identity = (value.data_ptr(), value.shape)
        if value.numel() and identity in seen:
            continue
        seen.add(identity)
        tensors[name] = value
    return tensors


def capture_tensors(
    model: nn.Module, optimizer: AdamW, engine: Engine
) -> dict[str, dict[str, Tensor]]:
    """Every tensor that the next step depends on, by the file it goes into."""
    return {
        "model": model_tensors(model),
        "optimizer": optimizer.state_tensors(),
        "engine": dict(engine.state_dict()),
    }


def capture_state(position: Position, data: ResumableData) -> dict[str, Any]:
    """The rest of what the next step depends on, as JSON values."""
    return {
        "position": position.to_json(),
        "data": data.state_dict(),
        "random": random_state.capture(),
    }


def restore(
    checkpoint: LoadedCheckpoint,
    model: nn.Module,
    optimizer: AdamW,
    engine: Engine,
    data: ResumableData,
) -> Position:
    """Puts a checkpoint back. Raises ``CheckpointCorrupt`` where it is of another run."""
    try:
        own = model_tensors(model)
        with torch.no_grad():
            for name, tensor in checkpoint.tensors("model"):
                target = own.pop(name)
                if target.shape != tensor.shape or target.dtype != tensor.dtype:
                    raise ValueError(
                        f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the checkpoint, "
                        f"{target.dtype} {tuple(target.shape)} in the model"
                    )
                target.copy_(tensor)
        if own:
            raise ValueError(f"the checkpoint lacks {sorted(own)[:3]}")
        optimizer.load_state_tensors(dict(checkpoint.tensors("optimizer")))
        engine.load_state_dict(dict(checkpoint.tensors("engine")))
        data.load_state_dict(checkpoint.state["data"])
        random_state.restore(checkpoint.state["random"])
        return Position.from_json(checkpoint.state["position"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{checkpoint.path} does not fit this run: {error}") from error
