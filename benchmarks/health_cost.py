"""What watching FP8 health costs on a GPU: trainings with it beside trainings without.

    python benchmarks/health_cost.py [--sizes 100M 400M 1.2B] [--recipes delayed current block
        torchao] [--layers N] [--periods 5]

Each case is trained three times through the product's own loop, telemetry and alarms included, with
one seed and so the same batches: without FP8 health, with ``telemetry.fp8_every_steps`` 10, and
without once more. Steps differ in length with the documents in them, so that each ten steps are
compared with the same ten of the two trainings around. Printed are the median over all tens of what
recording one of them adds, with the quartiles; the same of the second training without beside the
first, which is the noise; a step's milliseconds; how long the first step took, and the longest of
those that are left out (torchao compiles in them).

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fp8core.commands.train import run_train
from fp8core.telemetry import read_records

EVERY, WARM_UP = 10, 25

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


def spec(shape: dict[str, int], recipe: dict[str, Any], steps: int, every: int) -> dict[str, Any]:
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
        "telemetry": {"fp8_every_steps": every},
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
        every = job["telemetry"]["fp8_every_steps"]
        expected = job["training"]["steps"] // every if every else 0
        if health < expected:
            raise SystemExit(f"{health} records of FP8 health, not {expected}")
        return times, began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layers", type=int, help="blocks, where not those of the size")
    parser.add_argument("--periods", type=int, default=5, help="of ten steps, in each training")
    chosen = parser.parse_args()
    steps = WARM_UP + EVERY * chosen.periods
    for size in chosen.sizes:
        shape = SIZES[size] | ({"num_hidden_layers": chosen.layers} if chosen.layers else {})
        for recipe in chosen.recipes:
            name = f"{size} x {shape['num_hidden_layers']} {recipe}"
            found = []
            for every in (0, EVERY, 0):
                times, began = times_of_steps(spec(shape, RECIPES[recipe], steps, every))
                found.append([times[WARM_UP + EVERY * n] for n in range(chosen.periods + 1)])
                early = max(times[s + 1] - times[s] for s in range(1, WARM_UP))
                print(
                    f"{name}, fp8_every_steps {every}: first step after "
                    f"{times[1] - began:.1f} s, longest of the next {WARM_UP - 1} {early:.1f} s",
                    flush=True,
                )
                # The next training has the GPU and the compiled code of this one for itself.
                gc.collect()
                torch.cuda.empty_cache()
                torch._dynamo.reset()
            report(name, *([end - start for start, end in pairwise(times)] for times in found))


def report(name: str, before: list[float], recorded: list[float], after: list[float]) -> None:
    plain = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
    print(
        f"{name}: recording every {EVERY}th step adds {shares(plain, recorded)}, "
        f"{1000 * statistics.median(plain) / EVERY:.2f} ms a plain step; "
        f"noise {shares(before, after)}",
        flush=True,
    )


def shares(plain: list[float], other: list[float]) -> str:
    found = [100 * (b - a) / a for a, b in zip(plain, other, strict=True)]
    low, median, high = statistics.quantiles(found, n=4)
    return f"{median:+.2f} % (quartiles {low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    main()
