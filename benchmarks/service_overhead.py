"""A job through the service beside the bare training loop: tokens a second of the same steps.

    python benchmarks/service_overhead.py [--shape small] [--steps 42] [--repeats 3] [--apart]

The service is the whole local stack: API, controller, Postgres, Valkey and a node's worker, on this
machine. Its jobs report metrics of every step, FP8 health every ten, and stream their logs, which
a client follows. The bare loop is ``python -m fp8core train`` of the same spec, reporting every
sixth step, without health and nobody reading. ``--apart`` adds the bare loop with all the service's
telemetry, still with nobody reading, which tells what of the difference is telemetry and what is
the service. All in turn, ``--repeats`` times; of each the median of the runs. A run's speed is that
of the clock between the reports of its twelfth step, when the first with health is past, and of the
sixth before its last, so that nothing between is left out. Printed too is what of each is the floor
of such a step (`peers.floor`), measured behind them on the first GPU.

``small`` is for a CPU: `emulated`, one thread for each trainer (two cores at least, or the servers
take the trainer's time). The others need a GPU: te's delayed scaling, 2 x 4096 tokens a step,
stored in bf16; ``1b`` and ``3b`` are Llama-3.2's shapes, ``2b`` has half of the latter's blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peers.shapes import SHAPES as LLAMAS
from peers.shapes import Shape

from octrain.client import Client
from octrain.local.stack import LocalStack

EVERY = 6
"""Steps that the bare loop reports together; as many are not counted at the end."""
FROM = 2 * EVERY
"""The clock begins with this step: kernels of health are made at the tenth, once in a job."""

SPARSE = {"log_every_steps": EVERY, "fp8_every_steps": 0}
FULL = {"log_every_steps": 1, "fp8_every_steps": 10}

SERVED, BARE, BARE_WITH_TELEMETRY = "through the service", "bare loop", "bare loop, all telemetry"

SMALL = "small"
SHAPES: dict[str, Shape] = {
    SMALL: Shape(256, 704, layers=4, heads=4, kv_heads=4, vocabulary=272),
    **{name: LLAMAS[name] for name in ("1b", "2b", "3b")},
}


def spec_of(name: str, steps: int, telemetry: dict[str, Any]) -> dict[str, Any]:
    shape, (rows, length) = SHAPES[name], batch_of(name)
    on_cpu = name == SMALL
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "vocab_size": shape.vocabulary,
                "hidden_size": shape.hidden,
                "intermediate_size": shape.mlp,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "max_position_embeddings": length,
                "tie_word_embeddings": shape.tied,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "builtin"},
        "recipe": {"engine": "emulated" if on_cpu else "te", "amax_history_len": 16},
        "training": {
            "steps": steps,
            "batch_size": rows,
            "sequence_length": length,
            "precision": "method" if on_cpu else "throughput",
        },
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": telemetry,
        "resources": {"device": "cpu" if on_cpu else "cuda"},
    }


def batch_of(name: str) -> tuple[int, int]:
    """Rows of a step, and their length."""
    return (4, 256) if name == SMALL else (2, 4096)


def seconds_of_a_step(reported: dict[int, float], steps: int) -> float:
    """``reported``: when a step's figures were reported, seconds since the epoch."""
    return (reported[steps - EVERY] - reported[FROM]) / (steps - EVERY - FROM)


def bare(shape: str, steps: int, folder: Path, telemetry: dict[str, Any]) -> float:
    """Seconds of a step."""
    folder.mkdir()
    spec = folder / "spec.json"
    spec.write_text(json.dumps(spec_of(shape, steps, telemetry)))
    command = [sys.executable, "-m", "fp8core", "train", str(spec)]
    subprocess.run(
        [*command, "--workdir", str(folder / "work")],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    reported = {}
    for line in (folder / "work" / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics" and "train/loss" in record["values"]:
            reported[int(record["step"])] = float(record["time"])
    return seconds_of_a_step(reported, steps)


def served(stack: LocalStack, shape: str, steps: int) -> float:
    """Seconds of a step of a job that reports all there is, and whose logs are followed."""
    with Client(stack.url, stack.api_key) as client, ThreadPoolExecutor(1) as reader:
        job = client.jobs.create(spec_of(shape, steps, FULL))
        lines = reader.submit(lines_of, stack, job.id)
        job.wait()
        if job.status != "succeeded":
            raise SystemExit(f"the job {job.status}: {job.data.reason}: {job.data.detail}")
        (loss,) = job.metrics("train/loss", x="time")
        health = sum(len(series.points) for series in job.metrics("fp8/*/scale"))
        if len(loss.points) != steps or not health or not lines.result():
            raise SystemExit(
                f"{len(loss.points)} of {steps} losses, {health} scales and {lines.result()} "
                "lines of logs came"
            )
        reported = {step: when for step, (when, _) in enumerate(loss.points, start=1)}
        return seconds_of_a_step(reported, steps)


def lines_of(stack: LocalStack, job_id: str) -> int:
    """How many lines of logs a client of its own was sent, until the job ended."""
    with Client(stack.url, stack.api_key) as client:
        return sum(1 for _ in client.jobs.get(job_id).follow_logs())


def floor_of(name: str) -> dict[str, float]:
    """Of a step, in milliseconds; of a CPU it means nothing."""
    # The trainers have the GPU for themselves as long as this process has no torch.
    import torch
    from peers.floor import floor, told
    from peers.step_work import llama_step

    on_cpu = name == SMALL
    least = llama_step(SHAPES[name], *batch_of(name), bytes_each=4 if on_cpu else 2)
    found = floor(least, torch.device("cpu" if on_cpu else "cuda"))
    print(f"floor: {told(found)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=42)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="the bare loop with telemetry too")
    chosen = parser.parse_args()
    if chosen.steps % EVERY or chosen.steps <= FROM + EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, and more than {FROM + EVERY}")
    rows, length = batch_of(chosen.shape)
    names = [SERVED, *([BARE_WITH_TELEMETRY] if chosen.apart else []), BARE]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="octrain-overhead-") as temporary:
        stack = LocalStack(Path(temporary) / "stack", environment={"OMP_NUM_THREADS": "1"})
        with stack:
            if not stack.wait_for_nodes():
                raise SystemExit("no node registered")
            for number in range(chosen.repeats):
                for name, found in seconds.items():
                    began = time.monotonic()
                    if name == SERVED:
                        found.append(served(stack, chosen.shape, chosen.steps))
                    else:
                        folder = Path(temporary) / f"{name} {number}"
                        telemetry = SPARSE if name == BARE else FULL
                        found.append(bare(chosen.shape, chosen.steps, folder, telemetry))
                    print(
                        f"{name}: {found[-1] * 1000:.2f} ms a step "
                        f"({time.monotonic() - began:.0f} s in all)",
                        flush=True,
                    )
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        speeds = ", ".join(f"{rows * length / value:,.0f}" for value in found)
        print(f"{name}: {medians[name] * 1000:.2f} ms a step, {speeds} tokens/s")
    for name in names[:-1]:
        share = medians[BARE] / medians[name]
        print(f"{name}: {share:.4f} of the bare loop's tokens a second")
    least = floor_of(chosen.shape)["fp8"]
    for name, value in medians.items():
        print(f"{name}: {least / 1000 / value:.0%} of the floor")


if __name__ == "__main__":
    main()
