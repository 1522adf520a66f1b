"""Ranks of one job, each a process of its own, forked from one that has everything imported.

What the launcher does around them (torchrun, signals, one result) has tests of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from fp8core.commands.train import run_train
from fp8core.training.assemble import Assembled, assemble
from fp8core.training.ranks.place import FOLDER_VARIABLE, RankEnd, RankPlace
from fp8core.training.run import Run

Plant = Callable[[int, Assembled], None]
Prepare = Callable[[int], None]


@dataclass(frozen=True)
class Ended:
    """What became of the ranks: by their own words, by exit code, and their last engine state."""

    workdir: Path
    ends: list[RankEnd | None]
    codes: list[int | None]
    states: list[dict[str, torch.Tensor]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., Ended]:
    """Trains a spec with as many ranks as it asks for; ``plant`` gets each rank's learner.

    ``prepare`` is called in each rank's process before it begins.
    """
    count = 0

    def run(
        spec: Path,
        workdir: Path | None = None,
        *,
        plant: Plant = _nothing,
        prepare: Prepare = _as_it_is,
    ) -> Ended:
        nonlocal count
        count += 1
        workdir = workdir or tmp_path / f"ranks-work-{count}"
        folder = tmp_path / f"ranks-{count}"
        folder.mkdir()
        ranks = json.loads(spec.read_text())["resources"]["cpu_ranks"]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["fp8core.commands.train", "transformers.models.llama.modeling_llama"]
        )
        # As under torchrun, it outlives each of the ranks: one may end before the others look.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [
            context.Process(
                target=_rank,
                args=(RankPlace(rank, ranks, folder), store.port, spec, workdir, plant, prepare),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        places = [RankPlace(rank, ranks, folder) for rank in range(ranks)]
        states = [folder / f"state-{rank}.safetensors" for rank in range(ranks)]
        return Ended(
            workdir,
            [place.read_end() for place in places],
            [process.exitcode for process in processes],
            [load_file(path) for path in states if path.exists()],
        )

    return run


def _nothing(rank: int, assembled: Assembled) -> None:
    """Plants nothing."""


def _as_it_is(rank: int) -> None:
    """Prepares nothing."""


def _rank(
    place: RankPlace, port: int, spec: Path, workdir: Path, plant: Plant, prepare: Prepare
) -> None:
    os.environ.update(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            FOLDER_VARIABLE: str(place.folder),
        }
    )
    torch.set_num_threads(1)
    made: list[Assembled] = []

    def planted(*arguments: Any, **options: Any) -> Assembled:
        made.append(assemble(*arguments, **options))
        plant(place.rank, made[-1])
        return made[-1]

    prepare(place.rank)
    module: Any = sys.modules[Run.__module__]
    module.assemble = planted
    code = run_train(spec, workdir, [])
    if made and made[-1].learner.engine.state_dict():
        state = made[-1].learner.engine.state_dict()
        save_file(dict(state), place.folder / f"state-{place.rank}.safetensors")
    os._exit(code)
