"""How long a save keeps training waiting: written beside training, and while training stands still.

One process trains a small Llama on the built-in text in fp32. Every few steps all that a checkpoint
holds is saved through the saver of every run, in turns by two of them: one copies, and has a thread
write the copy (as runs do); the other writes in the step's own thread. Both write, read back, hash
and sync the same bytes. Blocked is the time until the next step may begin, where no earlier save is
left to wait for. Beside it the lengths of the steps while a thread was writing and while none was:
what the thread takes from a CPU that training needs too, is seen there.

    python benchmarks/saving.py [--hidden 384] [--layers 6] [--device cpu] [--saves 6] [--every 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# As every trainer has it, and before torch is imported: waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from fp8core import engines
from fp8core.commands.quiet import quieten_libraries
from fp8core.spec import JobSpec
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.assemble import assemble
from fp8core.training.build import Places, build_on_ranks
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.position import Position
from fp8core.training.ranks.world import SOLO
from fp8core.training.saving import Saver
from fp8core.training.workdir import Workdir


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    quieten_libraries()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        Workdir(Path(folder)) as workdir,
        TelemetryWriter(workdir.telemetry) as telemetry,
    ):
        _measure(arguments, device, workdir, telemetry)


def _measure(
    arguments: argparse.Namespace,
    device: torch.device,
    workdir: Workdir,
    telemetry: TelemetryWriter,
) -> None:
    spec = _spec(arguments)
    engine = engines.create(spec.recipe, device)
    random_state.seed_everything(0, device)
    built = build_on_ranks(spec, Places(), SOLO, workdir, device=device, dtype=torch.float32)
    assembled = assemble(spec, engine, built.loaded)
    learner = assembled.learner
    store = CheckpointStore(workdir.checkpoints, keep_last=1, keep_best=0)
    savers = {
        beside: Saver(store, learner, None, built.data.train, telemetry, workdir, beside=beside)
        for beside in (True, False)
    }
    position = Position()
    blocked: dict[bool, list[float]] = {True: [], False: []}
    steps: dict[bool, list[float]] = {True: [], False: []}
    learner.model.train()
    for number in range(2 * (arguments.saves + 1)):
        beside = number % 2 == 0
        for _ in range(arguments.every):
            writing = savers[True].busy
            began = time.perf_counter()
            position.step += 1
            batches = [next(built.data.train)]
            learner.gradients(position.step, batches)
            learner.update(position.step, learner.gradient_norm())
            _finished(device)
            # The first of each kind warm up: memory is taken, and page-locked.
            if number > 1 and writing == savers[True].busy:
                steps[writing].append(time.perf_counter() - began)
        # The saver that writes at once waits for the other one outside of what is measured.
        if not beside:
            savers[True].finish()
        began = time.perf_counter()
        savers[beside].save(position, "periodic")
        # On a GPU the copy stands before the next step in the queue.
        _finished(device)
        if number > 1:
            blocked[beside].append(time.perf_counter() - began)
    savers[True].finish()
    size = sum(file.stat().st_size for file in workdir.checkpoints.rglob("*.safetensors"))
    print(f"one checkpoint                  {size / 2**20:8.0f} MiB, {device.type}")
    for beside, name in ((False, "written at once"), (True, "written beside training")):
        print(
            f"blocked, {name:<23}{1000 * statistics.median(blocked[beside]):8.1f} ms median of "
            f"{len(blocked[beside])}, {1000 * max(blocked[beside]):.1f} longest"
        )
    ratio = statistics.median(blocked[False]) / statistics.median(blocked[True])
    print(f"ratio                           {ratio:8.1f}")
    for writing, name in ((False, "while nothing is written"), (True, "while a thread writes")):
        if steps[writing]:
            print(
                f"a step {name:<25}{1000 * statistics.median(steps[writing]):8.1f} ms median of "
                f"{len(steps[writing])}"
            )


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _spec(arguments: argparse.Namespace) -> JobSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 4,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": max(arguments.hidden // 64, 1),
        "num_key_value_heads": max(arguments.hidden // 64, 1),
        "max_position_embeddings": 128,
    }
    return JobSpec.model_validate(
        {
            "model": {"source": "config", "config": config},
            "tokenizer": "bytes",
            "data": {"source": "builtin"},
            "recipe": {"engine": "amp", "dtype": "fp32"},
            "training": {"steps": 100_000, "batch_size": 1, "sequence_length": 128},
            "evaluation": {"fraction": 0.0},
            "resources": {"device": arguments.device},
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--saves", type=int, default=6, help="of each kind")
    parser.add_argument("--every", type=int, default=5, help="steps between two saves")
    parser.add_argument("--folder", help="where to write; the temporary folder by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
