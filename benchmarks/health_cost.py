"""What watching FP8 health costs on a GPU: recorded steps beside the plain ones around them.

    python benchmarks/health_cost.py [--sizes 100M 400M 1.2B] [--recipes delayed current block
        torchao] [--layers N] [--periods 12]

Each case is trained twice through the product's own loop, telemetry and alarms included: with
``telemetry.fp8_every_steps`` 10, and without health. All rows are of one text without an end, so
that no step has other documents, and other attention, than the next. Steps are told apart by their
place behind the last recorded one, 0 to 9, and each place has the median of its times in all
periods; what recording adds to ten steps is the sum of the ten medians less ten times that of the
places 5 to 9, which lie farthest from it. The same of the training without health is the noise.
Quartiles are those of 200 draws of periods with replacement. Printed too are a plain step's
milliseconds, how long the first step took, and the longest of those that are left out (torchao
compiles in them).

Llamas of 0.1, 0.4 and 1.2 billion parameters, the last with Llama-3.2-1B's widths; 4 x 2048 tokens
a step. ``--layers`` gives them another number of blocks: what is recorded grows with them as the
step does, compiling takes less. All cases run one after the other in one process, which saves the
imports of each. ``--dry-run`` goes the same way on a CPU, tiny, by `emulated`; its times mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fp8core.commands.train import run_train
from fp8core.telemetry import read_records

EVERY, WARM_UP, DRAWS = 10, 25, 200
FAR = range(5, EVERY)
ROWS, LENGTH = 4, 2048
TINY, ON_A_CPU = "tiny", "emulated"

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
    TINY: {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"engine": "te", "amax_history_len": 16},
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
    "torchao": {"engine": "torchao", "scaling": "tensorwise"},
    ON_A_CPU: {"engine": "emulated", "amax_history_len": 16},
}


def spec(
    shape: dict[str, int], recipe: dict[str, Any], steps: int, every: int, dry_run: bool
) -> dict[str, Any]:
    rows, length = (1, 64) if dry_run else (ROWS, LENGTH)
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "vocab_size": 512,
                "max_position_embeddings": LENGTH,
                **shape,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "text", "path": "text.txt"},
        "recipe": recipe,
        "conversion": {"small_gemm": "off"},
        "training": {"steps": steps, "batch_size": rows, "sequence_length": length},
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"fp8_every_steps": every},
        "resources": {"device": "cpu" if dry_run else "cuda"},
    }


def times_of_steps(job: dict[str, Any]) -> tuple[dict[int, float], float]:
    """When each step's loss was recorded, in seconds; and when training began."""
    with tempfile.TemporaryDirectory() as folder:
        path, workdir = Path(folder, "spec.json"), Path(folder, "run")
        path.write_text(json.dumps(job))
        rows, length = job["training"]["batch_size"], job["training"]["sequence_length"]
        letters = random.Random(0).choices("abcdefghij klmno ", k=2 * rows * length)
        tokens = job["training"]["steps"] * rows * length
        Path(folder, "text.txt").write_text("".join(letters) * (tokens // len(letters) + 1))
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
    recipes = [name for name in RECIPES if name != ON_A_CPU]
    sizes = [size for size in SIZES if size != TINY]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    parser.add_argument("--layers", type=int, help="blocks, where not those of the size")
    parser.add_argument("--periods", type=int, default=12, help="of ten steps, in each training")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.periods < 2:
        parser.error("--periods must be at least 2: the steps before the first full one warm up")
    if chosen.dry_run:
        chosen.sizes, chosen.recipes = [TINY], [ON_A_CPU]
    steps = WARM_UP + EVERY * chosen.periods
    for size in chosen.sizes:
        shape = SIZES[size] | ({"num_hidden_layers": chosen.layers} if chosen.layers else {})
        for recipe in chosen.recipes:
            name = f"{size} x {shape['num_hidden_layers']} {recipe}"
            found = {}
            for every in (EVERY, 0):
                job = spec(shape, RECIPES[recipe], steps, every, chosen.dry_run)
                times, began = times_of_steps(job)
                found[every] = periods(times, steps)
                early = max(times[s + 1] - times[s] for s in range(1, WARM_UP))
                print(
                    f"{name}, fp8_every_steps {every}: first step after "
                    f"{times[1] - began:.1f} s, longest of the next {WARM_UP - 1} {early:.1f} s",
                    flush=True,
                )
                # The next training has the GPU and the compiled code of this one for itself.
                gc.collect()
                if not chosen.dry_run:
                    torch.cuda.empty_cache()
                torch._dynamo.reset()
            plain = statistics.median(time for period in found[0] for time in period)
            print(
                f"{name}: recording every {EVERY}th step adds {share(found[EVERY])}, "
                f"{1000 * plain:.2f} ms a plain step; noise {share(found[0])}",
                flush=True,
            )


def periods(times: dict[int, float], steps: int) -> list[list[float]]:
    """Seconds of the steps of each period; the first is one whose number is a multiple of ten.

    A step's time is that from the record before it to its own. Records of a GPU come a step late,
    so that the first step of a period takes up the figures of the last plain one.
    """
    lengths = {later: times[later] - times[step] for step, later in pairwise(sorted(times))}
    first = WARM_UP + (-WARM_UP) % EVERY
    starts = range(first, steps - EVERY + 1, EVERY)
    return [[lengths[start + place] for place in range(EVERY)] for start in starts]


def added(found: list[list[float]]) -> float:
    """Per cent that recording adds to ten steps."""
    medians = [statistics.median(place) for place in zip(*found, strict=True)]
    plain = statistics.median(period[place] for period in found for place in FAR)
    return 100 * float(sum(medians) / (EVERY * plain) - 1)


def share(found: list[list[float]]) -> str:
    draw = random.Random(0)
    drawn = [added(draw.choices(found, k=len(found))) for _ in range(DRAWS)]
    low, _, high = statistics.quantiles(drawn, n=4)
    return f"{added(found):+.2f} % (quartiles {low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    main()
