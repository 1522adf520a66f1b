"""What watching FP8 health costs on a GPU: steps with it beside steps without, in one training.

    python benchmarks/health_cost.py [--recipes delayed current block torchao] [--sizes small large]

Trains with ``telemetry.fp8_every_steps`` 20 through the product's own loop, telemetry and alarms
included. The ten steps around a recorded one are compared with the ten steps after them, none of
which is recorded: their ratio is the cost of recording every tenth step. Prints the median of the
ratios of all such pairs, with the quartiles, and a step's milliseconds. ``small``: a Llama of 0.4
billion parameters, 4 x 2048 tokens a step; ``large``: one of 1.2 billion with Llama-3.2-1B's shape.
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

EVERY, WINDOW, WARM_UP, PAIRS = 20, 10, 40, 6
STEPS = WARM_UP + EVERY * PAIRS + WINDOW

SIZES = {
    "small": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
    },
}
HEADS = {"small": 16, "large": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "amax_history_len": 16},
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
    "torchao": {"engine": "torchao", "scaling": "tensorwise"},
}


def spec(size: str, recipe: str) -> dict[str, Any]:
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "num_attention_heads": HEADS[size],
                "vocab_size": 512,
                "max_position_embeddings": 2048,
                **SIZES[size],
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "builtin"},
        "recipe": RECIPES[recipe],
        "conversion": {"small_gemm": "off"},
        "training": {"steps": STEPS, "batch_size": 4, "sequence_length": 2048},
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"fp8_every_steps": EVERY},
        "resources": {"device": "cuda"},
    }


def times_of_steps(size: str, recipe: str) -> dict[int, float]:
    """When each step's loss was recorded, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spec.json")
        path.write_text(json.dumps(spec(size, recipe)))
        command = [sys.executable, "-m", "fp8core", "train", str(path)]
        subprocess.run(
            [*command, "--workdir", f"{folder}/run"], check=True, stdout=subprocess.DEVNULL
        )
        times: dict[int, float] = {}
        health = 0
        for line in Path(folder, "run", "telemetry.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["type"] == "metrics" and "train/loss" in record["values"]:
                times[record["step"]] = record["time"]
            health += record["type"] == "metrics" and any(
                name.startswith("fp8/") for name in record["values"]
            )
        if health < STEPS // EVERY:
            raise SystemExit(f"{recipe}: only {health} records of FP8 health in {STEPS} steps")
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    chosen = parser.parse_args()
    for size in chosen.sizes:
        for recipe in chosen.recipes:
            times = times_of_steps(size, recipe)
            ratios, plain = [], []
            for pair in range(PAIRS):
                # The window holds the recorded step, and the next, in which its figures are read.
                middle = WARM_UP + EVERY * pair
                start, turn, end = (middle + WINDOW * part - WINDOW // 2 for part in (0, 1, 2))
                plain.append((times[end] - times[turn]) / WINDOW)
                ratios.append((times[turn] - times[start]) / WINDOW / plain[-1])
            low, median, high = statistics.quantiles(ratios, n=4)
            print(
                f"{size} {recipe}: ratio {median:.4f} (quartiles {low:.4f} to {high:.4f}), "
                f"plain step {statistics.median(plain) * 1000:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
