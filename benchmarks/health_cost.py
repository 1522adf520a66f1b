"""What watching FP8 health costs: the same training with and without it, in turn, on a GPU.

    python benchmarks/health_cost.py [--rounds 3]

A Llama of about 0.4 billion parameters with a te recipe, 4 x 2048 tokens a step. Prints the seconds
of a step with ``telemetry.fp8_every_steps`` 10 and with 0, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, WARM_UP, EVERY = 70, 20, 10


def spec(every: int) -> dict[str, Any]:
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "vocab_size": 512,
                "max_position_embeddings": 2048,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "builtin"},
        "recipe": {"engine": "te", "amax_history_len": 16},
        "training": {"steps": STEPS, "batch_size": 4, "sequence_length": 2048},
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"fp8_every_steps": every},
        "resources": {"device": "cuda"},
    }


def seconds_of_a_step(every: int) -> float:
    """The mean over the steps after warm-up, from the times of the telemetry's own records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spec.json")
        path.write_text(json.dumps(spec(every)))
        command = [sys.executable, "-m", "fp8core", "train", str(path)]
        subprocess.run(
            [*command, "--workdir", f"{folder}/run"], check=True, stdout=subprocess.DEVNULL
        )
        times: dict[int, float] = {}
        for line in Path(folder, "run", "telemetry.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["type"] == "metrics" and "train/loss" in record["values"]:
                times[record["step"]] = record["time"]
    # Figures arrive a step late; over a multiple of EVERY steps that shifts both ends alike.
    last = STEPS - 1
    first = last - (last - WARM_UP) // EVERY * EVERY
    return (times[last] - times[first]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    pairs = [(seconds_of_a_step(EVERY), seconds_of_a_step(0)) for _ in range(rounds)]
    for watched, plain in pairs:
        print(f"with {watched:.5f} s, without {plain:.5f} s, ratio {watched / plain:.4f}")
    print(f"median ratio {statistics.median(a / b for a, b in pairs):.4f}")


if __name__ == "__main__":
    main()
