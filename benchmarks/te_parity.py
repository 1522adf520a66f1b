"""Does Octrain's te engine train like Transformer Engine itself? Losses of one model, four ways.

    python benchmarks/te_parity.py OUT [--steps 300] [--only octrain te ...] [--plot]

A Llama of about 100 million parameters learns Python's standard library (real text, bytes as
tokens) from one set of initial weights and one order of batches:

    te        a hand-written Transformer Engine loop that shares no code with this project
    te-again  the same a second time; te-fused the same with PyTorch's fused AdamW: the noise
    te-layers  the same loop over ``te.TransformerLayer``, Transformer Engine's own fused blocks
    octrain   ``python -m fp8core train`` with a te recipe: fused blocks
    octrain-plain  the same layer by layer, with ``conversion.fuse: none``
    accelerate  Accelerate with ``TERecipeKwargs``
    bf16      the hand-written loop without FP8

Needs a GPU with FP8, Transformer Engine and accelerate. Writes ``losses.csv`` to OUT after each run
and prints a table: losses, and the gap to ``te``, largest and mean, of losses smoothed over 20
steps. ``--plot`` draws ``te_parity.png`` from the losses in OUT, and trains nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from te_by_hand import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    LENGTH,
    RECIPE,
    ROWS,
    batches,
    initial_model,
    prepare,
    train_by_hand,
    with_te_blocks,
    with_te_layers,
)

__all__ = ["octrain_losses", "octrain_spec", "read", "smoothed", "write"]


def octrain_spec(folder: Path, steps: int, fuse: str) -> dict[str, Any]:
    """The job that trains what ``prepare`` has put into ``folder``."""
    return {
        "model": {"source": "path", "path": str(folder / "initial")},
        "tokenizer": {"source": "bytes"},
        "data": {
            "source": "jsonl",
            "path": str(folder / "rows.jsonl"),
            "shuffle": False,
            "packing": False,
            "append_end_of_text": False,
        },
        "recipe": {"engine": "te", **RECIPE},
        "conversion": {"fuse": fuse, "small_gemm": "off"},
        "training": {
            "steps": steps,
            "batch_size": ROWS,
            "sequence_length": LENGTH,
            "max_grad_norm": CLIP,
            "optimizer": {
                "name": "adamw",
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPSILON,
                "weight_decay": 0.0,
            },
            "schedule": {"name": "constant"},
        },
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0},
        "telemetry": {"fp8_every_steps": 0},
        "resources": {"device": "cuda"},
    }


def octrain(folder: Path, steps: int, fuse: str = "auto") -> list[float]:
    (folder / "spec.json").write_text(json.dumps(octrain_spec(folder, steps, fuse)))
    workdir = folder / f"octrain-{fuse}"
    command = [sys.executable, "-m", "fp8core", "train", str(folder / "spec.json")]
    subprocess.run([*command, "--workdir", str(workdir)], check=True)
    return octrain_losses(workdir)


def octrain_losses(workdir: Path) -> list[float]:
    losses = []
    for line in (workdir / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics" and "train/loss" in record["values"]:
            losses.append(float(record["values"]["train/loss"]))
    return losses


def data_of(folder: Path, steps: int) -> Iterator[torch.Tensor]:
    """Of the tokenizer that Octrain has saved."""
    return batches(folder, steps, next(folder.glob("octrain-*/tokenizer")))


def by_hand(
    folder: Path, steps: int, *, fp8: bool = True, fused: bool = False, blocks: bool = False
) -> list[float]:
    model = initial_model(folder)
    if fp8:
        model = with_te_blocks(model) if blocks else with_te_layers(model)
    return train_by_hand(model, data_of(folder, steps), fp8=fp8, fused=fused)


def accelerated(folder: Path, steps: int) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**RECIPE)])
    model = initial_model(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    losses = []
    for ids in data_of(folder, steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().float())
    return torch.stack(losses).tolist()


def smoothed(losses: list[float], window: int = 20) -> torch.Tensor:
    values = torch.tensor(losses)
    return values.unfold(0, window, 1).mean(-1)


def write(runs: dict[str, list[float]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *runs])
        for step, losses in enumerate(zip(*runs.values(), strict=True), start=1):
            writer.writerow([step, *(f"{loss:.6f}" for loss in losses)])


def read(path: Path) -> dict[str, list[float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def report(runs: dict[str, list[float]], to: str) -> None:
    """``to``: the run that the others' gaps are to."""
    steps = len(runs[to])
    marks = [step for step in (1, 10, 50, 100, 200, 300, 500, 1000) if step <= steps]
    print("run         " + "".join(f"{mark:>9}" for mark in marks) + "   max gap  mean gap")
    reference = smoothed(runs[to])
    for name, losses in runs.items():
        gap = (smoothed(losses) - reference).abs()
        print(
            f"{name:12}"
            + "".join(f"{losses[mark - 1]:9.4f}" for mark in marks)
            + f"{gap.max().item():10.5f}{gap.mean().item():10.5f}",
            flush=True,
        )


def plot(runs: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gaps) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    reference = smoothed(runs["te" if "te" in runs else "te-layers"])
    for number, (name, losses) in enumerate(runs.items()):
        look = {"label": name, "linewidth": 1, "color": f"C{number}"}
        curves.plot(smoothed(losses), **look)
        if name != "te":
            gaps.plot(smoothed(losses) - reference, **look)
    curves.set(xlabel="step", ylabel="loss, mean of 20 steps", yscale="log")
    gaps.set(xlabel="step", ylabel="gap to the hand-written te loop")
    for axes in (curves, gaps):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    some = "some of the runs, an octrain one among them"
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help=some)
    parser.add_argument("--plot", action="store_true", help="draw what an earlier run left in OUT")
    arguments = parser.parse_args()
    if not any(name.startswith("octrain") for name in arguments.only):
        parser.error("--only needs an octrain run: the others take its tokenizer")
    folder: Path = arguments.out
    if arguments.plot:
        runs = read(folder / "losses.csv")
        for reference in ("te", "te-layers"):
            report(runs, reference)
        plot(runs, folder / "te_parity.png")
        return
    steps: int = arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        # Of longer runs the first steps are the same.
        prepare(work, max(steps, 300))
        train_all(work, steps, folder, arguments.only)


# Octrain first: the others take its tokenizer.
WAYS: dict[str, Callable[[Path, int], list[float]]] = {
    "octrain-plain": lambda work, steps: octrain(work, steps, "none"),
    "octrain": lambda work, steps: octrain(work, steps),
    "te-layers": lambda work, steps: by_hand(work, steps, blocks=True),
    "te": lambda work, steps: by_hand(work, steps),
    "te-again": lambda work, steps: by_hand(work, steps),
    "bf16": lambda work, steps: by_hand(work, steps, fp8=False),
    "accelerate": lambda work, steps: accelerated(work, steps),
    "te-fused": lambda work, steps: by_hand(work, steps, fused=True),
}


def train_all(work: Path, steps: int, folder: Path, only: list[str]) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} x {LENGTH} tokens")
    runs: dict[str, list[float]] = {}
    for name, way in WAYS.items():
        if name not in only:
            continue
        started = time.perf_counter()
        runs[name] = way(work, steps)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        write(runs, folder / "losses.csv")
        torch.cuda.empty_cache()
    for reference in runs:
        if reference in ("te", "te-layers"):
            report(runs, reference)
    plot(runs, folder / "te_parity.png")


if __name__ == "__main__":
    main()
