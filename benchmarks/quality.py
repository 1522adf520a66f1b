"""Quality beside speed: losses of one model on real text in every precision, and time to a loss.

    python benchmarks/quality.py OUT [--shape 100m] [--steps 500] [--batch 8]
        [--rows floor,bf16,delayed,...] [--seeds 0] [--together 1] [--timed-steps 0] [--dry-run]
    python benchmarks/quality.py OUT --table [--plot FILE.png]

Trains the shape with the product itself (``python -m fp8core spare``), a row after another, on the
same batches of Python's standard library (bytes as tokens). Rows called ``NAME_again`` are the same
once more: what two runs differ by without any difference in precision. ``--seeds`` trains each row
from several weights, each time with the text in another order and other text held out; rows of seed
1 are called ``NAME_seed``, of seed 2 ``NAME_seed2``. ``NAME_plain``: layer by layer, where blocks
are fused by default.

A small model leaves most of a GPU idle: ``--together N`` trains N rows at once, for their losses
alone. Speeds are then those of ``--timed-steps`` steps of each recipe, trained one after another.
The row ``floor`` trains nothing: it measures what the GEMMs, attention and update of such a step
take on this device by themselves (`peers.floor`), in bf16 and in FP8, whose floor is one for all
scalings. Attention is taken as if each row were of one document; ends of documents, of which one in
thirteen rows of this text has one, spare less than 3 % of it.

Each row leaves ``OUT/SHAPE-STEPS-ROW.json``, or ``OUT/SHAPE-timed-ROW.json``, the floor
``OUT/SHAPE-floor-BATCHxLENGTH.json``, and one that is there is not run again: rows can be spread
over many short calls. ``--table`` prints what is there as Markdown, a table for each seed: the loss
on text held out from training (twenty times in a row; by default every recipe evaluates in high
precision, so that it is the weights that are compared), its gap to ``bf16``'s, the mean gap of the
losses in training behind the first tenth, milliseconds of a step and, where it was measured for
this batch on this device, what the floor is of them, tokens a second, and the steps and seconds of
training until the held-out loss was as low as the row that ends highest reaches. Where there are
several seeds, a last table has the gaps of all of them to ``bf16`` of the same seed, and those of
``NAME_again`` to ``NAME``: the noise that the former are to be read beside.
``--dry-run``: tiny, on a CPU, te's rows by `emulated`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from peers.row_names import FLOOR
from peers.shapes import Shape
from quality_tables import of_seed, plot, seed_of, seeds_table, table, unseeded

EVALUATIONS = 20
"""How often in a row the loss on held-out text is taken."""

VOCABULARY = 272
"""Bytes and the few tokens beside them, up to a multiple of 16."""
SHAPES: dict[str, Shape] = {
    "dry": Shape(32, 64, layers=2, heads=2, kv_heads=2, tied=False, vocabulary=VOCABULARY),
    "100m": Shape(768, 2560, layers=12, heads=12, kv_heads=12, tied=False, vocabulary=VOCABULARY),
    "1b": Shape(2048, 8192, layers=16, heads=32, kv_heads=8, tied=False, vocabulary=VOCABULARY),
}
STORED_BYTES = 4
"""Of a parameter: jobs store fp32 by default."""
DELAYED = {"engine": "te", "amax_history_len": 16}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"engine": "amp", "dtype": "bf16"},
    "delayed": DELAYED,
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
    "torchao": {"engine": "torchao"},
}
ROWS = (
    FLOOR,
    *("bf16", "bf16_again", "bf16_plain"),
    *("delayed", "delayed_again", "delayed_plain"),
    *("current", "current_again", "current_plain"),
    *("block", "block_again", "block_plain"),
    *("torchao", "torchao_again"),
)


@dataclass(frozen=True)
class Order:
    """A row to train: for its losses, or ``timed``, by itself and for its speed."""

    row: str
    steps: int
    timed: bool

    def result(self, out: Path, shape: str) -> Path:
        return out / f"{shape}-{'timed' if self.timed else self.steps}-{self.row}.json"


def batch_of(chosen: argparse.Namespace) -> tuple[int, int]:
    """Rows of a step, and their length."""
    return (2, 64) if chosen.dry_run else (chosen.batch, 1024)


def spec_of(order: Order, chosen: argparse.Namespace, text: Path) -> dict[str, Any]:
    name, *variants = unseeded(order.row).split("_")
    recipe = RECIPES[name]
    if chosen.dry_run and recipe["engine"] == "te":
        scaling = {"scaling": "current"} if name == "current" else {}
        recipe = {"engine": "emulated", **scaling}
    shape, (batch, length) = SHAPES[chosen.shape], batch_of(chosen)
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
                "max_position_embeddings": 4096,
                "tie_word_embeddings": shape.tied,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "jsonl", "path": str(text)},
        "recipe": recipe,
        # Layers that FP8 does not make faster are to show what it does to the loss all the same.
        "conversion": {
            "small_gemm": "off",
            "fuse": "none" if "plain" in variants else "auto",
        },
        "training": {
            "steps": order.steps,
            "batch_size": batch,
            "sequence_length": length,
            "seed": seed_of(order.row),
            "optimizer": {"lr": chosen.learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "schedule": {"name": "cosine", "warmup_steps": max(1, order.steps // 20)},
        },
        "evaluation": (
            {"every_steps": 0, "fraction": 0.0}
            if order.timed
            else {
                "every_steps": max(1, order.steps // EVALUATIONS),
                "fraction": 0.05,
                "max_batches": 8,
            }
        ),
        "checkpoint": {"every_steps": 0, "keep_best": 0, "final": False},
        "telemetry": {"fp8_every_steps": 0},
        "resources": {"device": "cpu" if chosen.dry_run else "cuda"},
    }


def write_text(path: Path, characters: int) -> None:
    """The sources of Python's standard library, one a line."""
    written = 0
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if written >= characters:
                break
            if "site-packages" in source.parts:
                continue
            text = source.read_text(encoding="utf-8", errors="ignore")
            written += len(text)
            file.write(json.dumps({"text": text}) + "\n")


class Trainers:
    """Trainers that import while those before them train; a row each, in the order given."""

    def __init__(self, count: int, ahead: int) -> None:
        self._left = count
        self._ready: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for _ in range(min(count, ahead)):
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "fp8core", "spare"]
        self._left -= 1
        self._ready.put(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))

    def train(self, spec: Path, workdir: Path) -> None:
        """Waits for the next one to train ``spec``."""
        trainer = self._ready.get()
        if self._left:
            self._start()
        trainer.communicate(json.dumps({"spec_path": str(spec), "workdir": str(workdir)}) + "\n")
        if trainer.returncode:
            raise RuntimeError(f"its trainer ended with {trainer.returncode}")


def run(
    order: Order, trainers: Trainers, chosen: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Trains the row; its losses and seconds by step, and what its report says."""
    name = f"{order.row}-{order.steps}-{order.timed}"
    spec, workdir = folder / f"{name}.json", folder / name
    spec.write_text(json.dumps(spec_of(order, chosen, folder / "text.jsonl")))
    trainers.train(spec, workdir)
    losses, seconds, tokens, held_out = [], [], [], []
    for line in (workdir / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics" and "train/loss" in record["values"]:
            values = record["values"]
            losses.append(round(float(values["train/loss"]), 5))
            seconds.append(round(float(values["perf/step_seconds"]), 5))
            tokens.append(float(values["perf/tokens_per_second"]))
        if record["type"] == "metrics" and "eval/loss" in record["values"]:
            held_out.append((record["step"], round(float(record["values"]["eval/loss"]), 5)))
    report = json.loads((workdir / "report.json").read_bytes())
    return {
        "row": order.row,
        "shape": chosen.shape,
        "batch": batch_of(chosen),
        "steps": len(losses),
        "together": 1 if order.timed else chosen.together,
        "parameters": report["model"]["parameters"],
        "converted": report["conversion"]["converted"],
        "device": report["device"]["name"],
        "torch": report["versions"]["torch"],
        # The first steps build kernels.
        "tokens_per_second": median(tokens[len(tokens) // 5 :]),
        "losses": losses,
        "held_out": held_out,
        "seconds": seconds,
    }


def train(orders: Sequence[Order], together: int, chosen: argparse.Namespace, folder: Path) -> bool:
    """Trains what has no result yet, ``together`` at once; whether all went well."""
    left = [order for order in orders if not order.result(chosen.out, chosen.shape).exists()]
    trainers = Trainers(len(left), 2 * together)

    def one(order: Order) -> bool:
        began = time.monotonic()
        try:
            found = run(order, trainers, chosen, folder)
        except (OSError, RuntimeError) as error:  # the other rows are worth having all the same
            print(f"{order.row} failed: {error}", flush=True)
            return False
        order.result(chosen.out, chosen.shape).write_text(json.dumps(found) + "\n")
        print(f"{order.row}: {order.steps} steps, {time.monotonic() - began:.1f} s", flush=True)
        return True

    with ThreadPoolExecutor(max(1, together)) as pool:
        return all(list(pool.map(one, left)))


def floor_file(out: Path, shape: str, batch: Sequence[int]) -> Path:
    rows, length = batch
    return out / f"{shape}-{FLOOR}-{rows}x{length}.json"


def measure_floor(chosen: argparse.Namespace) -> None:
    """Leaves the floor of a step in its file, unless it is there; of a CPU it means nothing."""
    file = floor_file(chosen.out, chosen.shape, batch_of(chosen))
    if file.exists():
        return
    # The trainers have the GPU for themselves as long as this process has no torch.
    import torch
    from peers.floor import floor, told
    from peers.step_work import llama_step

    from fp8core.training.device import describe_device

    device = torch.device("cpu" if chosen.dry_run else "cuda")
    found = floor(llama_step(SHAPES[chosen.shape], *batch_of(chosen), STORED_BYTES), device)
    print(f"floor: {told(found)}", flush=True)
    facts = {"device": describe_device(device)["name"], "torch": str(torch.__version__)}
    file.write_text(json.dumps({**facts, "floor": found}) + "\n")


def of_floor(
    timed: dict[str, Any], milliseconds: float, chosen: argparse.Namespace
) -> float | None:
    """What the floor is of a step of that row; None where it was not measured. A result that does
    not tell its batch is of the chosen one."""
    batch = timed.get("batch", batch_of(chosen))
    file = floor_file(chosen.out, timed["shape"], batch)
    if not file.exists():
        return None
    measured = json.loads(file.read_text())
    if measured["device"] != timed["device"]:
        return None
    name = unseeded(timed["row"]).split("_")[0]
    kind = "bf16" if RECIPES[name]["engine"] == "amp" else "fp8"
    return float(measured["floor"][kind]) / milliseconds


def timed_row(row: str) -> str:
    """The row whose speed is this one's too: neither a repeat nor a seed changes it."""
    return unseeded(row).removesuffix("_again")


def results(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """What there is, by seed and in the order of ``ROWS``, each with ``milliseconds`` of a step,
    and what of them is the floor: of its timed run, or its own if nothing else ran beside it."""
    folder, shape, steps = chosen.out, chosen.shape, chosen.steps
    start = f"{shape}-{steps}-"
    names = [path.stem.removeprefix(start) for path in folder.glob(f"{start}*.json")]
    places = {row: place for place, row in enumerate(ROWS)}
    known = [row for row in names if unseeded(row) in places]
    rows = []
    for row in sorted(known, key=lambda row: (seed_of(row), places[unseeded(row)])):
        found = json.loads(Order(row, steps, timed=False).result(folder, shape).read_text())
        timed = Order(timed_row(row), steps, timed=True).result(folder, shape)
        alone = json.loads(timed.read_text()) if timed.exists() else found
        if alone["together"] == 1:
            seconds = alone["seconds"]
            found["milliseconds"] = 1000 * median(seconds[len(seconds) // 5 :])
            found["of_floor"] = of_floor(alone, found["milliseconds"], chosen)
            found["tokens_per_second"] = alone["tokens_per_second"]
        rows.append(found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--seeds", default="0", help="numbers, separated by commas")
    parser.add_argument("--batch", type=int, default=8, help="rows of 1024 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--together", type=int, default=1, help="rows trained at once")
    parser.add_argument("--timed-steps", type=int, default=0, help="of each recipe, for its speed")
    parser.add_argument("--table", action="store_true", help="print what is there")
    parser.add_argument("--plot", type=Path, help="draw what is there")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shape = "dry"
    names = chosen.rows.split(",")
    if unknown := [row for row in names if row not in ROWS]:
        parser.error(f"{unknown[0]} is no row; there are {', '.join(ROWS)}")
    seeds = chosen.seeds.split(",")
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        parser.error(f"{wrong[0]!r} is no seed: seeds are whole numbers from 0")
    with_floor = FLOOR in names
    names = [row for row in names if row != FLOOR]
    names = list(dict.fromkeys(of_seed(row, int(seed)) for seed in seeds for row in names))
    chosen.out.mkdir(parents=True, exist_ok=True)
    well = True
    if names and not chosen.table:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            characters = 200_000 if chosen.dry_run else 4096 * 1024 * chosen.steps // 500
            write_text(folder / "text.jsonl", characters)
            losses = [Order(row, chosen.steps, timed=False) for row in names]
            well = train(losses, chosen.together, chosen, folder)
            if chosen.timed_steps:
                alone = dict.fromkeys(timed_row(row) for row in names)
                timed = [Order(row, chosen.timed_steps, timed=True) for row in alone]
                well = train(timed, 1, chosen, folder) and well
    if with_floor and not chosen.table:
        measure_floor(chosen)
    rows = results(chosen)
    if not rows and not names:
        return
    if not rows:
        raise SystemExit(f"no rows of {chosen.shape} and {chosen.steps} steps in {chosen.out}")
    tables = [
        table([found for found in rows if seed_of(found["row"]) == seed])
        for seed in dict.fromkeys(seed_of(found["row"]) for found in rows)
    ]
    print("\n\n".join(tables if len(tables) < 2 else [*tables, seeds_table(rows)]))
    if chosen.plot is not None:
        plot(rows, chosen.plot)
    if not well:
        raise SystemExit("some rows failed")


if __name__ == "__main__":
    main()
