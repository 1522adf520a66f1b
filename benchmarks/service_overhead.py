"""A job through the service beside the bare training loop: tokens a second of the same steps.

    python benchmarks/service_overhead.py [--steps 24] [--repeats 2] [--device cpu]

The service is the whole local stack: API, controller, Postgres, Valkey and a node's worker, on this
machine. Its jobs report metrics of every step, FP8 health every ten, and stream their logs. The
bare loop is ``python -m fp8core train`` of the same spec, reporting every sixth step, without
health and nobody reading. Both in turn, ``--repeats`` times; of each the median of the runs, where
a run's speed is that of its steps behind the first six. On a CPU the recipe is `emulated` and the
trainers have one thread each (two cores at least, or the servers take the trainer's time); with
``--device cuda`` it is te's delayed scaling and a larger model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octrain.client import Client
from octrain.local.stack import LocalStack

EVERY = 6
"""Steps that the bare loop reports together; as many are not counted at the beginning."""

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"hidden": 256, "mlp": 704, "layers": 4, "heads": 4, "rows": 4, "length": 256},
    "cuda": {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "rows": 2, "length": 4096},
}


def spec_of(device: str, steps: int, telemetry: dict[str, Any]) -> dict[str, Any]:
    size = SIZES[device]
    engine = "emulated" if device == "cpu" else "te"
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "hidden_size": size["hidden"],
                "intermediate_size": size["mlp"],
                "num_hidden_layers": size["layers"],
                "num_attention_heads": size["heads"],
                "num_key_value_heads": size["heads"],
                "max_position_embeddings": size["length"],
            },
        },
        "data": {"source": "builtin"},
        "recipe": {"engine": engine, "amax_history_len": 16},
        "training": {
            "steps": steps,
            "batch_size": size["rows"],
            "sequence_length": size["length"],
        },
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": telemetry,
        "resources": {"device": device},
    }


def bare(device: str, steps: int, folder: Path) -> float:
    """Seconds of a step."""
    folder.mkdir()
    spec = folder / "spec.json"
    telemetry = {"log_every_steps": EVERY, "fp8_every_steps": 0}
    spec.write_text(json.dumps(spec_of(device, steps, telemetry)))
    command = [sys.executable, "-m", "fp8core", "train", str(spec)]
    subprocess.run(
        [*command, "--workdir", str(folder / "work")],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = []
    for line in (folder / "work" / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        values = record["values"] if record["type"] == "metrics" else {}
        if "perf/step_seconds" in values and record["step"] > EVERY:
            found.append(float(values["perf/step_seconds"]))
    return statistics.fmean(found)


def served(client: Client, device: str, steps: int) -> float:
    """Seconds of a step of a job that reports all there is."""
    telemetry = {"log_every_steps": 1, "fp8_every_steps": 10}
    job = client.jobs.create(spec_of(device, steps, telemetry))
    job.wait()
    if job.status != "succeeded":
        raise SystemExit(f"the job {job.status}: {job.data.reason}: {job.data.detail}")
    found = [
        value
        for series in job.metrics("perf/step_seconds")
        for step, value in zip(series.steps, series.values, strict=True)
        if step > EVERY
    ]
    if len(found) != steps - EVERY:
        raise SystemExit(f"{len(found)} of {steps - EVERY} steps were reported")
    return statistics.fmean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    chosen = parser.parse_args()
    if chosen.steps % EVERY or chosen.steps <= EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, and more than that")
    alone: list[float] = []
    through: list[float] = []
    with tempfile.TemporaryDirectory(prefix="octrain-overhead-") as temporary:
        stack = LocalStack(Path(temporary) / "stack", environment={"OMP_NUM_THREADS": "1"})
        with stack:
            if not stack.wait_for_nodes():
                raise SystemExit("no node registered")
            with Client(stack.url, stack.api_key) as client:
                for number in range(chosen.repeats):
                    through.append(served(client, chosen.device, chosen.steps))
                    alone.append(bare(chosen.device, chosen.steps, Path(temporary) / str(number)))
    tokens = SIZES[chosen.device]["rows"] * SIZES[chosen.device]["length"]
    for name, seconds in (("bare loop", alone), ("through the service", through)):
        speeds = ", ".join(f"{tokens / value:,.0f}" for value in seconds)
        print(f"{name}: {statistics.median(seconds) * 1000:.1f} ms a step, {speeds} tokens/s")
    ratio = statistics.median(alone) / statistics.median(through)
    print(f"through the service: {ratio:.3f} of the bare loop's tokens a second")


if __name__ == "__main__":
    main()
