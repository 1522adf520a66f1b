"""What watching FP8 health costs on a GPU: a recorded step beside plain ones of the same training.

    python benchmarks/health_cost.py [--sizes 100M 400M 1.2B] [--recipes delayed current block
        torchao] [--layers N] [--groups 20] [--at-most 2]

Each case is one training through the product's own loop, telemetry and alarms included, of which
the benchmark alone says which steps are recorded: behind the steps to warm up come windows of six
steps, three of them a group, in an order that is drawn: none recorded, the third recorded, the four
in the middle recorded. What a recorded step takes beyond a plain one shows in its own time, in that
of the step before (while which the host enqueues it) and in that of the step behind (where its
figures are read), all of them in its window; so it is what the whole window takes beyond the plain
one of its group, and for the four their quarter. Both windows lie within two seconds of each other,
so that what differs between hours and hosts, or drifts, is in both. Printed is the median of all
groups, with the quartiles and the 95 % interval of medians of groups drawn with replacement.

Recording every tenth step adds a tenth of that to a plain step. It is the four in a row that tell
it, for they are four times what the windows' noise hides. That a step of ten costs what one of four
does holds because nothing is carried from one recorded step to the next: each begins and ends its
record, counts in the same kernels (or replays the same graph), and has its figures read and written
once. Where the host has time to spare a lone step hides more of its work in it than four do, so
that the four tell too much rather than too little. The third window checks it: a step recorded by
itself among plain ones, as every tenth is. What it takes beyond one of the four is printed too, and
where the 95 % interval of that is above zero, the case is judged by the steps recorded alone.

Exits with 1 where the upper quartile of what recording every tenth step adds is ``--at-most`` per
cent or more.

All rows are of one text without an end, so that no step has other documents, and other attention,
than the next. Printed are a plain step's milliseconds, how long the first step took, and the
longest of those that warm up (the kernels of recorded steps are made in them: torchao compiles,
graphs are captured).

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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp8core.commands.train import run_train
from fp8core.telemetry import read_records
from fp8core.training.fp8_health import FP8Health

EVERY = 10
WARM_UP, WARMING = 30, frozenset({3, 13, 14, 17, 20, 23, 26, 29})
"""Steps to warm up, and those of them that are recorded: nine in a row are plain, for a run finds
out from eight whether its steps are to be graphs."""
WINDOW, BEHIND, DRAWS = 6, 2, 2000
PLAIN, ALONE, FOUR = (), (2,), (1, 2, 3, 4)
"""Places within a window that are recorded. On a GPU the figures of a step come a step late."""
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


@dataclass(frozen=True)
class Group:
    """Of each kind of window the number of its first step."""

    starts: dict[tuple[int, ...], int]

    def recorded(self) -> set[int]:
        return {start + place for places, start in self.starts.items() for place in places}


@dataclass(frozen=True)
class Times:
    """Seconds of the windows of a group."""

    plain: float
    alone: float
    four: float


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    lowest: float
    highest: float

    def told(self, unit: str, digits: int) -> str:
        value, low, high, lowest, highest = (
            f"{number:+.{digits}f}"
            for number in (self.value, self.low, self.high, self.lowest, self.highest)
        )
        return f"{value} {unit} (quartiles {low} to {high}, 95 % {lowest} to {highest})"


def groups_of(count: int) -> list[Group]:
    """``count`` groups behind the steps to warm up; the same order of windows in each run."""
    draw = random.Random(0)
    groups = []
    for number in range(count):
        first = WARM_UP + 1 + 3 * WINDOW * number
        kinds = draw.sample([PLAIN, ALONE, FOUR], 3)
        groups.append(Group({kind: first + WINDOW * at for at, kind in enumerate(kinds)}))
    return groups


def spec(
    shape: dict[str, int], recipe: dict[str, Any], steps: int, dry_run: bool
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
        "telemetry": {"fp8_every_steps": EVERY},
        "resources": {"device": "cpu" if dry_run else "cuda"},
    }


def times_of_steps(
    job: dict[str, Any], recorded: Collection[int]
) -> tuple[dict[int, float], float]:
    """When each step's loss was recorded, in seconds; and when training began.

    The health of the steps ``recorded`` is recorded, and no other's: what the job says of it is
    not asked.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, workdir = Path(folder, "spec.json"), Path(folder, "run")
        path.write_text(json.dumps(job))
        rows, length = job["training"]["batch_size"], job["training"]["sequence_length"]
        letters = random.Random(0).choices("abcdefghij klmno ", k=2 * rows * length)
        tokens = job["training"]["steps"] * rows * length
        Path(folder, "text.txt").write_text("".join(letters) * (tokens // len(letters) + 1))
        with mock.patch.object(FP8Health, "is_due", lambda _, step: step in recorded):
            code = run_train(path, workdir, [])
        if code:
            raise SystemExit((workdir / "result.json").read_text())
        times: dict[int, float] = {}
        began, health = 0.0, set()
        for record, _ in read_records(workdir / "telemetry.jsonl"):
            if record["type"] != "metrics":
                began = began or record["time"]
                continue
            if "train/loss" in record["values"]:
                times[record["step"]] = record["time"]
            if any(name.startswith("fp8/") for name in record["values"]):
                health.add(record["step"])
        if health != set(recorded):
            wrong = sorted(health ^ set(recorded))
            raise SystemExit(f"FP8 health was to be of other steps: {wrong} differ")
        return times, began


def windows(times: dict[int, float], groups: list[Group]) -> list[Times]:
    """What the windows took. A step's time is that from the record before it to its own."""
    lengths = {later: times[later] - times[step] for step, later in pairwise(sorted(times))}

    def window(start: int) -> float:
        return sum(lengths[start + place] for place in range(WINDOW))

    return [
        Times(*(window(group.starts[kind]) for kind in (PLAIN, ALONE, FOUR))) for group in groups
    ]


def plain_step(found: list[Times]) -> float:
    """Milliseconds."""
    return 1000 * statistics.median(group.plain for group in found) / WINDOW


def of_four(found: list[Times]) -> float:
    """Milliseconds that each of four recorded steps takes beyond a plain one."""
    return 1000 * statistics.median((group.four - group.plain) / len(FOUR) for group in found)


def of_one(found: list[Times]) -> float:
    """The same of a step recorded alone."""
    return 1000 * statistics.median(group.alone - group.plain for group in found)


def beyond(found: list[Times]) -> float:
    """Milliseconds that a step recorded alone takes beyond one of four."""
    differences = (
        group.alone - group.plain - (group.four - group.plain) / len(FOUR) for group in found
    )
    return 1000 * statistics.median(differences)


def share(of: Callable[[list[Times]], float]) -> Callable[[list[Times]], float]:
    """Per cent that recording every tenth step adds, where a recorded step costs ``of``."""
    return lambda found: 100 * of(found) / (EVERY * plain_step(found))


def estimate(of: Callable[[list[Times]], float], found: list[Times]) -> Estimate:
    draw = random.Random(0)
    drawn = [of(draw.choices(found, k=len(found))) for _ in range(DRAWS)]
    parts = statistics.quantiles(drawn, n=40)
    return Estimate(of(found), parts[9], parts[29], parts[0], parts[38])


def judged(name: str, found: list[Times], at_most: float) -> bool:
    """Prints what recording costs; whether its upper quartile is below ``at_most`` per cent."""
    more = estimate(beyond, found)
    alone_costs_more = more.lowest > 0
    by = of_one if alone_costs_more else of_four
    adds = estimate(share(by), found)
    well = adds.high < at_most
    print(
        f"{name}: {plain_step(found):.2f} ms a plain step, of {len(found)} groups\n"
        f"  a recorded step takes more, one of four: {estimate(of_four, found).told('ms', 2)}\n"
        f"  a recorded step takes more, alone: {estimate(of_one, found).told('ms', 2)}\n"
        f"  alone beyond one of four: {more.told('ms', 2)}\n"
        f"  recording every {EVERY}th step adds {adds.told('%', 3)}, by the steps recorded "
        f"{'alone' if alone_costs_more else 'four in a row'}: "
        f"{'below' if well else 'NOT below'} {at_most:g} %",
        flush=True,
    )
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    recipes = [name for name in RECIPES if name != ON_A_CPU]
    sizes = [size for size in SIZES if size != TINY]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    parser.add_argument("--layers", type=int, help="blocks, where not those of the size")
    parser.add_argument("--groups", type=int, default=20, help="of 18 steps, in each training")
    parser.add_argument("--at-most", type=float, default=2.0, help="per cent at every 10 steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.groups < 2:
        parser.error("--groups must be at least 2: there is no interval of one")
    if chosen.dry_run:
        chosen.sizes, chosen.recipes = [TINY], [ON_A_CPU]
    groups = groups_of(chosen.groups)
    recorded = WARMING.union(*(group.recorded() for group in groups))
    # What the last window leaves behind is told with the step behind it.
    steps = WARM_UP + 3 * WINDOW * chosen.groups + BEHIND
    verdicts = []
    for size in chosen.sizes:
        shape = SIZES[size] | ({"num_hidden_layers": chosen.layers} if chosen.layers else {})
        for recipe in chosen.recipes:
            name = f"{size} x {shape['num_hidden_layers']} {recipe}"
            job = spec(shape, RECIPES[recipe], steps, chosen.dry_run)
            times, began = times_of_steps(job, recorded)
            early = max(times[step + 1] - times[step] for step in range(1, WARM_UP))
            print(
                f"{name}: first step after {times[1] - began:.1f} s, longest of the next "
                f"{WARM_UP - 1} {early:.1f} s, all within {times[steps] - began:.1f} s",
                flush=True,
            )
            verdicts.append(judged(name, windows(times, groups), chosen.at_most))
            # The next training has the GPU and the compiled code of this one for itself.
            gc.collect()
            if not chosen.dry_run:
                torch.cuda.empty_cache()
            torch._dynamo.reset()
    if not all(verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
