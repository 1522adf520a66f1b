"""What watching FP8 health costs on a GPU: steps with it beside steps without, in one training.

    python benchmarks/health_cost.py [--sizes 100M 400M 1.2B] [--recipes delayed current block
        torchao] [--layers N] [--pairs 12]

Trains with ``telemetry.fp8_every_steps`` 10 through the product's own loop, telemetry and alarms
included. The five steps around a recorded one (the host works ahead, and reads the figures a step
later) are compared with the five after them, which nothing is recorded in; every window with a
recorded step has one without beside it, so that what the clocks of GPU and host do over time falls
on both. The difference over ten steps' time is the cost. Printed are the median over all such
pairs, with the quartiles, a step's milliseconds, and how long the first step took and the longest
of those before the first pair (torchao compiles in them).

Llamas of 0.1, 0.4 and 1.2 billion parameters, the last with Llama-3.2-1B's widths; 4 x 2048 tokens
a step. ``--layers`` gives them another number of blocks: what is recorded grows with them as the
step does, compiling takes less. All cases run one after the other in one process, which saves the
imports of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from fp8core.commands.train import run_train
from fp8core.telemetry import read_records

EVERY, WINDOW, WARM_UP = 10, 5, 30

SIZES: dict[str, dict[str, int]] = {
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "400M": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "1.2B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "amax_history_len": 16},
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
    "torchao": {"engine": "torchao", "scaling": "tensorwise"},
}


def spec(shape: dict[str, int], recipe: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "vocab_size": 512,
                "max_position_embeddings": 2048,
                **shape,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "builtin"},
        "recipe": recipe,
        "conversion": {"small_gemm": "off"},
        "training": {"steps": steps, "batch_size": 4, "sequence_length": 2048},
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"fp8_every_steps": EVERY},
        "resources": {"device": "cuda"},
    }


def times_of_steps(job: dict[str, Any]) -> tuple[dict[int, float], float]:
    """When each step's loss was recorded, in seconds; and when training began."""
    with tempfile.TemporaryDirectory() as folder:
        path, workdir = Path(folder, "spec.json"), Path(folder, "run")
        path.write_text(json.dumps(job))
        code = run_train(path, workdir, [])
        if code:
            raise SystemExit((workdir / "result.json").read_text())
        times: dict[int, float] = {}
        began, health = 0.0, 0
        for record, _ in read_records(workdir / "telemetry.jsonl"):
            if record["type"] != "metrics":
                began = began or record["time"]
                continue
            if "train/loss" in record["values"]:
                times[record["step"]] = record["time"]
            health += any(name.startswith("fp8/") for name in record["values"])
        expected = job["training"]["steps"] // EVERY
        if health < expected:
            raise SystemExit(f"{health} records of FP8 health, not {expected}")
        return times, began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layers", type=int, help="blocks, where not those of the size")
    parser.add_argument("--pairs", type=int, default=12, help="of windows, in each training")
    chosen = parser.parse_args()
    steps = WARM_UP + EVERY * chosen.pairs
    for size in chosen.sizes:
        shape = SIZES[size] | ({"num_hidden_layers": chosen.layers} if chosen.layers else {})
        for recipe in chosen.recipes:
            times, began = times_of_steps(spec(shape, RECIPES[recipe], steps))
            report(f"{size} x {shape['num_hidden_layers']} {recipe}", times, began, chosen.pairs)
            # The next training has the GPU and the compiled code of this one for itself.
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()


def report(name: str, times: dict[int, float], began: float, pairs: int) -> None:
    differences, plain = [], []
    for pair in range(pairs):
        middle = WARM_UP + EVERY * pair
        start, turn, end = (middle + WINDOW * part - WINDOW // 2 - 1 for part in (0, 1, 2))
        plain.append((times[end] - times[turn]) / WINDOW)
        differences.append((times[turn] - times[start]) - (times[end] - times[turn]))
    step = statistics.median(plain)
    low, median, high = (
        100 * value / (EVERY * step) for value in statistics.quantiles(differences, n=4)
    )
    early = range(1, WARM_UP - WINDOW)
    print(
        f"{name}: {median:+.2f} % (quartiles {low:+.2f} to {high:+.2f}) of a plain step of "
        f"{step * 1000:.2f} ms; first step after {min(times.values()) - began:.1f} s, longest of "
        f"the next {len(early)} {max(times[s + 1] - times[s] for s in early):.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
