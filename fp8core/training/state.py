"""What a checkpoint holds, taken from a run and put back into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fp8core.conversion import restore_layers
from fp8core.errors import CheckpointCorrupt, SpecRefused
from fp8core.training import random_state
from fp8core.training.assemble import Assembled
from fp8core.training.checkpoint import LoadedCheckpoint
from fp8core.training.device import ranks_pointer
from fp8core.training.learner import Learner
from fp8core.training.position import Position
from fp8core.training.ranks.world import SOLO, World

if TYPE_CHECKING:
    from fp8core.training.adapter import Adapter

__all__ = [
    "DataPlace",
    "ResumableData",
    "capture_state",
    "capture_tensors",
    "kept_small_gemms",
    "model_tensors",
    "restore",
]


class DataPlace(Protocol):
    """Where the data stands behind the last step, as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...


class ResumableData(DataPlace, Protocol):
    """The source of training batches, as far as a checkpoint is concerned."""

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


def capture_tensors(learner: Learner, adapter: Adapter | None) -> dict[str, dict[str, Tensor]]:
    """Every tensor that the next step depends on, by the file it goes into.

    Of a model with adapters only what is trained: the rest is as it was loaded.
    """
    trained = {"adapter": adapter.tensors()} if adapter else {"model": model_tensors(learner.model)}
    return {
        **trained,
        "optimizer": learner.optimizer.state_tensors(),
        "engine": dict(learner.engine.state_dict()),
    }


def capture_state(
    position: Position, data: DataPlace, adapter: Adapter | None, world: World = SOLO
) -> dict[str, Any]:
    """The rest of what the next step depends on, as JSON values, of all ranks."""
    own, *others = world.gather(random_state.capture())
    return {
        "position": position.to_json(),
        "data": data.state_dict(),
        "random": own,
        **({"other_ranks": others} if others else {}),
        **({"base": adapter.base, "base_places": adapter.base_places} if adapter else {}),
    }


def kept_small_gemms(checkpoint: LoadedCheckpoint) -> dict[str, str]:
    """The layers that the job kept in bf16 for their size when it began, each with why.

    None of a checkpoint that says nothing of them.
    """
    position = checkpoint.state.get("position")
    found = position.get("small_gemms") if isinstance(position, dict) else None
    return found if isinstance(found, dict) else {}


def _is_base(adapter: Adapter, state: dict[str, Any]) -> bool:
    """Whether the model is the one beside which the checkpoint's adapters were trained. Earlier
    versions wrote ``base`` alone."""
    places = state.get("base_places", adapter.base_places)
    return bool(state["base"] == adapter.base and places == adapter.base_places)


def _load_engine(checkpoint: LoadedCheckpoint, assembled: Assembled) -> None:
    """Raises ValueError for what is of other layers, as of an earlier version that fused others."""
    try:
        assembled.learner.engine.load_state_dict(dict(checkpoint.tensors("engine")))
    except ValueError as error:
        if assembled.adapter is not None:  # the checkpoint is no model by itself
            raise
        raise ValueError(
            f"{error}. To train on from its weights, begin another job with it as the model"
        ) from error


def restore(checkpoint: LoadedCheckpoint, assembled: Assembled, data: ResumableData) -> Position:
    """Puts a checkpoint back. Raises ``CheckpointCorrupt`` where it is of another run.

    Raises ``SpecRefused`` where another number of ranks made it: a step would hold other batches
    and dropout would draw other numbers, so the run would be neither the one nor the other.
    """
    learner, adapter = assembled.learner, assembled.adapter
    world = learner.world
    others = checkpoint.state.get("other_ranks", [])
    if len(others) + 1 != world.size:
        raise SpecRefused(
            f"{checkpoint.path.name} was made by {len(others) + 1} rank(s), and a run goes on with "
            f"as many; this one has {world.size}. To train on from its weights, begin another job "
            "with it as the model",
            pointer=ranks_pointer(learner.engine.device.type),
        )
    try:
        if adapter is not None and not _is_base(adapter, checkpoint.state):
            raise ValueError("its adapters were trained beside other weights than this model's")
        own = model_tensors(learner.model) if adapter is None else adapter.tensors()
        with torch.no_grad():
            for name, tensor in checkpoint.tensors("model" if adapter is None else "adapter"):
                target = own.pop(name)
                if target.shape != tensor.shape or target.dtype != tensor.dtype:
                    raise ValueError(
                        f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the checkpoint, "
                        f"{target.dtype} {tuple(target.shape)} in the model"
                    )
                target.copy_(tensor)
        if own:
            raise ValueError(f"the checkpoint lacks {sorted(own)[:3]}")
        learner.optimizer.load_state_tensors(dict(checkpoint.tensors("optimizer")))
        _load_engine(checkpoint, assembled)
        data.load_state_dict(checkpoint.state["data"])
        random_state.restore([checkpoint.state["random"], *others][world.rank])
        position = Position.from_json(checkpoint.state["position"])
        if position.step != checkpoint.step:
            raise ValueError(f"its state is of step {position.step!r}")
        # Last: the engine's state is that of all layers that were converted once.
        restore_layers(assembled.conversion, position.fallback)
        return position
    except torch.OutOfMemoryError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{checkpoint.path} does not fit this run: {error}") from error
