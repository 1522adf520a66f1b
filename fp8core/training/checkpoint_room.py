"""The check, before the first step, that the disks have room for a run's checkpoints.

Whoever copies the checkpoints to a folder elsewhere may have that checked too, by environment
variables: ``FP8CORE_STORE_FOLDER``, and in ``FP8CORE_STORE_HELD_BYTES`` what of this job's
checkpoints is there already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fp8core.disk_room import Room, bytes_below, check_room, planned_checkpoints
from fp8core.spec import JobSpec
from fp8core.training.learner import Learner
from fp8core.training.state import capture_tensors, model_tensors
from fp8core.training.workdir import Workdir

if TYPE_CHECKING:  # peft takes its time to import
    from fp8core.training.adapter import Adapter

__all__ = ["HELD_VARIABLE", "STORE_VARIABLE", "check_checkpoint_room"]

STORE_VARIABLE = "FP8CORE_STORE_FOLDER"
HELD_VARIABLE = "FP8CORE_STORE_HELD_BYTES"


def check_checkpoint_room(
    spec: JobSpec, learner: Learner, adapter: Adapter | None, workdir: Workdir
) -> None:
    """Raises ``StorageFull`` where the workdir or the store cannot hold what the spec keeps.

    Sizes are those of the live tensors, which are allocated whole before the first step; files
    of JSON beside them are left out of account.
    """
    tensors = capture_tensors(learner, adapter)
    checkpoint = sum(_bytes(named.values()) for named in tensors.values())
    checkpoint += bytes_below(workdir.tokenizer)
    with_weights = adapter is None or spec.adapter is None or spec.adapter.export != "adapter"
    exported = model_tensors(learner.model) if with_weights else tensors["adapter"]
    places = [Room("the work folder", workdir.path, bytes_below(workdir.checkpoints))]
    if os.environ.get(STORE_VARIABLE):
        held = int(os.environ.get(HELD_VARIABLE, "0"))
        places.append(Room("the artifact store", Path(os.environ[STORE_VARIABLE]), held))
    keep = spec.checkpoint
    check_room(
        places,
        checkpoint=checkpoint,
        model=_bytes(exported.values()) if keep.final else 0,
        keep=keep.keep_last + keep.keep_best,
        planned=planned_checkpoints(
            spec.training.steps,
            save_every=keep.every_steps,
            evaluate_every=spec.evaluation.every_steps,
            keep_best=keep.keep_best,
        ),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
