"""Room on a disk for a run's checkpoints: what they need, and whether it is there.

With C the bytes of one checkpoint and E those of the exported model, a run needs in each place that
keeps checkpoints (its workdir, a store that they are copied to)

    n C + E - held,   n = min(keep_last + keep_best + 2, planned)

A new checkpoint is whole before the oldest is removed, and one that was removed may for a while
still be on its way: that is the 2. ``planned`` is how many the run can write at all, ``held`` what
of its checkpoints lies there already. Places on one file system need the sum. No torch here: a
supervisor asks the same before it starts a trainer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8core.errors import StorageFull

__all__ = ["Room", "bytes_below", "check_room", "planned_checkpoints"]


@dataclass(frozen=True)
class Room:
    """A place that is to hold checkpoints; ``name`` is what a person calls it."""

    name: str
    folder: Path
    held: int = 0


def planned_checkpoints(steps: int, *, save_every: int, evaluate_every: int, keep_best: int) -> int:
    """How many checkpoints a run of so many steps can write: periodic ones, one for each
    evaluation that may be among the best, and the last."""
    periodic = steps // save_every if save_every else 0
    best = steps // evaluate_every if evaluate_every and keep_best else 0
    return periodic + best + 1


def check_room(
    places: Iterable[Room],
    *,
    checkpoint: int,
    model: int,
    keep: int,
    planned: int,
) -> None:
    """Compares the free bytes of each place's file system with what is needed there.

    ``checkpoint`` and ``model`` are C and E in bytes, ``keep`` is keep_last + keep_best. Raises
    ``StorageFull``, with the numbers, where there is too little.
    """
    count = min(keep + 2, planned)
    by_device: dict[int, list[Room]] = {}
    for place in places:
        by_device.setdefault(os.stat(_existing(place.folder)).st_dev, []).append(place)
    for rooms in by_device.values():
        needed = sum(max(0, count * checkpoint + model - room.held) for room in rooms)
        free = shutil.disk_usage(_existing(rooms[0].folder)).free
        if free >= needed:
            continue
        names = " and ".join(f"{room.name} {room.folder}" for room in rooms)
        have = "have, on one file system," if len(rooms) > 1 else "has"
        held = sum(room.held for room in rooms)
        there = f", of which {_size(held)} are there already" if held else ""
        raise StorageFull(
            f"{names} {have} {_size(free)} free, and the run's checkpoints need {_size(needed)} "
            f"({count} of {_size(checkpoint)} at once and the model of {_size(model)}"
            f"{' in each' if len(rooms) > 1 else ''}{there}); free some room, or keep fewer",
            pointer="/checkpoint/keep_last",
        )


def bytes_below(folder: Path) -> int:
    """The bytes of all files below a folder; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
