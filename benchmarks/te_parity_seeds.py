"""Does Octrain's te engine train like Transformer Engine itself? The signed gaps of several seeds.

    python benchmarks/te_parity_seeds.py OUT [--seeds 0 1 2 3] [--steps 160] [--only ...] [--plot]

The model, text and ways of ``te_parity.py``; a seed is an order of the rows and a set of initial
weights. ``te``, by hand and layer by layer, is what the others' gaps are to:

    te-rounded  te from initial weights rounded to bf16: what chance does
    te-layers  ``te.TransformerLayer`` by hand
    octrain    the trainer with fused blocks, in this process
    octrain-plain  the same layer by layer
    bf16       by hand without FP8

Of each run the gap of losses smoothed over 20 steps, with its sign, is averaged over the run. A way
that trains as well as another has gaps of either sign, whose mean is within about two standard
errors of 0. Writes ``losses-SEED.csv`` to OUT after each run, beside the runs that it holds
already; ``--plot`` reads them, prints the tables, draws ``te_parity_seeds.png`` and trains nothing.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from te_by_hand import (
    batches,
    initial_model,
    prepare,
    train_by_hand,
    with_te_blocks,
    with_te_layers,
)
from te_parity import octrain_losses, octrain_spec, read, smoothed, write
from torch import Tensor, nn

from fp8core.data import load_tokenizer
from fp8core.spec import parse_spec
from fp8core.telemetry import TelemetryWriter
from fp8core.training.build import Places
from fp8core.training.run import Run
from fp8core.training.stopping import StopRequest
from fp8core.training.workdir import Workdir

WAYS = ("te", "te-rounded", "te-layers", "octrain", "octrain-plain", "bf16")

Losses = Mapping[str, list[float]]


def octrain(folder: Path, steps: int, fuse: str) -> list[float]:
    """What ``python -m fp8core train`` does, in this process."""
    fields = octrain_spec(folder, steps, fuse)
    fields["checkpoint"]["final"] = False
    path = folder / f"octrain-{fuse}"
    with Workdir(path) as workdir, TelemetryWriter(workdir.telemetry) as telemetry:
        places = Places(base=folder)
        Run(parse_spec(fields), workdir, telemetry, StopRequest(), places=places).execute()
    return octrain_losses(path)


def train_all(seed: int, steps: int, only: list[str], out: Path) -> None:
    path = out / f"losses-{seed}.csv"
    runs: dict[str, list[float]] = read(path) if path.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        prepare(work, steps, seed)
        spec = parse_spec(octrain_spec(work, steps, "none"))
        load_tokenizer(spec).save(work / "tokenizer")
        data = list(batches(work, steps, work / "tokenizer"))

        def by_hand(
            convert: Callable[[Any], nn.Module] | None, rounded: bool = False
        ) -> list[float]:
            model = initial_model(work)
            if rounded:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(parameter.bfloat16())
            fp8 = convert is not None
            return train_by_hand(model if convert is None else convert(model), data, fp8=fp8)

        ways: dict[str, Callable[[], list[float]]] = {
            "octrain": lambda: octrain(work, steps, "auto"),
            "octrain-plain": lambda: octrain(work, steps, "none"),
            "te": lambda: by_hand(with_te_layers),
            "te-rounded": lambda: by_hand(with_te_layers, rounded=True),
            "te-layers": lambda: by_hand(with_te_blocks),
            "bf16": lambda: by_hand(None),
        }
        for name in (way for way in ways if way in only):
            started = time.perf_counter()
            runs[name] = ways[name]()
            gc.collect()
            torch.cuda.empty_cache()
            seconds = time.perf_counter() - started
            print(f"seed {seed}, {name}: {seconds:.1f} s, {runs[name][-1]:.4f}", flush=True)
            write(runs, path)


def gaps(runs: Losses, to: str) -> dict[str, Tensor]:
    """Of the other ways to ``to``, smoothed, by step; none where ``to`` was not run."""
    if to not in runs:
        return {}
    reference = smoothed(runs[to])
    return {name: smoothed(runs[name]) - reference for name in WAYS if name in runs and name != to}


def report(seeds: Mapping[int, Losses], to: str) -> None:
    """The mean gap of each run to ``to``; over the seeds their mean, its standard error, spread."""
    by_way: dict[str, dict[int, float]] = {}
    for seed, runs in seeds.items():
        for name, gap in gaps(runs, to).items():
            by_way.setdefault(name, {})[seed] = float(gap.mean())
    print(f"\n{f'mean gap to {to}':24}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds))
    for name, means in by_way.items():
        cells = (f"{means[seed]:10.4f}" if seed in means else f"{'':10}" for seed in seeds)
        line = f"{name:24}" + "".join(cells)
        if len(means) > 1:
            spread = stdev(means.values())
            error = spread / len(means) ** 0.5
            line += f"   mean {fmean(means.values()):.4f} ± {error:.4f}, spread {spread:.4f}"
        print(line)


def plot(seeds: Mapping[int, Losses], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for runs in seeds.values() for name in gaps(runs, "te")))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(4 * len(names), 4), sharey=True, squeeze=False
    )
    for name, axes in zip(names, panels[0], strict=True):
        for place, (seed, runs) in enumerate(seeds.items()):
            gap = gaps(runs, "te").get(name)
            if gap is not None:
                steps = range(20, 20 + len(gap))
                axes.plot(steps, gap, linewidth=1, color=f"C{place}", label=f"seed {seed}")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0][0].set_ylabel("gap to te by hand, mean of 20 steps")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS[:4])
    parser.add_argument("--plot", action="store_true", help="draw what earlier runs left in OUT")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if not arguments.plot:
        out.mkdir(parents=True, exist_ok=True)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        for seed in arguments.seeds:
            train_all(seed, arguments.steps, arguments.only, out)
    found = {
        int(path.stem.partition("-")[2]): read(path) for path in sorted(out.glob("losses-*.csv"))
    }
    for to in ("te", "te-layers"):
        report(found, to)
    if arguments.plot:
        plot(found, out / "te_parity_seeds.png")


if __name__ == "__main__":
    main()
