"""Training steps a second on one GPU, beside the peers: same shape, same text, same settings.

    python benchmarks/train_peers.py [--shape 3b] [--rows floor,fused,fused_head,plain,...]
        [--steps 15] [--warm-up 10] [--repeats 1] [--precision bf16] [--profile] [--out FILE.json]
        [--at-least fused_head=33500,fused_head=1.5*accelerate] [--dry-run]

Every row runs in a process of its own, one after another, ``--repeats`` times in turn (all imports
come before the first: `row_processes`): 2 x 4096 tokens of real text (bytes of Python's standard
library) a step, random weights in bf16 (or fp32 under bf16 autocast), AdamW with states in the
format of the weights, clipping at norm 1. Prints tokens a second (of the median step; of several
repeats their median, and half of what lies between the largest and the smallest), the peak of
allocated memory, the host's time to enqueue a step, the ratio to the first peer, and the share of
the floor, which is a row of its own: what the step's GEMMs (in FP8, or in bf16 for the rows in
bf16), attention and update take on this GPU by themselves (`peers.floor`).

``--at-least`` names what rows must reach, in tokens a second or as a multiple of another row's
median; it counts as reached where the row's median less its spread does. With ``--profile`` three
more steps run under torch's profiler: kernels by kind are printed, and between which of them the
GPU stood idle. ``--dry-run`` goes the same ways on a CPU, tiny, te's rows by `emulated`; its times
mean nothing. Exits with 1 where a row failed or a target was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.row_names import FLOOR, IN_BF16, ON_A_GPU_ONLY, ROW_NAMES
from peers.shapes import SHAPES, TINY
from row_processes import ends_of, wait_for_turn

FOLDER = Path(__file__).resolve().parent
PROFILED = 3
DEFAULT_ROWS = "floor,fused,fused_head,plain,bf16,accelerate"
DRY = {"shape": TINY, "length": 64, "steps": 3, "warm_up": 2}
"""What a dry run has of the options that say how much is computed."""
REACHED = "reached"


def run_row(
    chosen: argparse.Namespace, when_imported: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Trains one row in this process; ``when_imported`` is called before the GPU is touched."""
    import torch
    from device_clock import DeviceClock
    from peers.floor import floor
    from peers.step_work import llama_step
    from peers.training_rows import ROWS, import_libraries
    from peers.work import Work, real_text

    count = chosen.warm_up + chosen.steps
    tokens = real_text(count, chosen.batch, chosen.length)
    device = torch.device("cpu" if chosen.dry_run else "cuda")
    work = Work(chosen.shape, chosen.batch, chosen.length, tokens, chosen.precision, device)
    import_libraries(chosen.row, device)
    when_imported()
    if chosen.row == FLOOR:
        least = llama_step(work.dimensions, work.rows, work.length, work.dtype.itemsize)
        return {"row": FLOOR, "floor": floor(least, device)}
    started = time.perf_counter()
    step = ROWS[chosen.row](work)
    built = time.perf_counter() - started
    clock = DeviceClock(device)
    enqueued, losses = [], []
    for number in range(1, count + 1):
        if number == min(3, count):
            clock.forget_peak()
        before = time.perf_counter()
        losses.append(step(number))
        enqueued.append(time.perf_counter() - before)
        clock.mark()
    milliseconds = clock.milliseconds()[chosen.warm_up - 1 :]
    median = statistics.median(milliseconds)
    if chosen.profile:
        print_profile(step, count, median)
    return {
        "row": chosen.row,
        "name": ROW_NAMES[chosen.row],
        "milliseconds": median,
        "tokens_per_second": chosen.batch * chosen.length * 1000 / median,
        "spread": (max(milliseconds) - min(milliseconds)) / median,
        # Of the steps that are measured, most.
        "graphed": getattr(step, "replayed", 0) > len(milliseconds) / 2,
        "peak_gib": clock.peak_gib(),
        "host_milliseconds": statistics.median(enqueued[chosen.warm_up :]) * 1000,
        "build_seconds": built,
        # With it goes what torch.compile takes to compile.
        "first_step_seconds": enqueued[0],
        "losses": [round(float(losses[i]), 4) for i in (0, count // 2, count - 1)],
        "device": clock.device_name(),
        "torch": str(torch.__version__),
    }


def print_profile(step: Callable[[int], Any], count: int, milliseconds: float) -> None:
    """The kernels of the last steps once more, by kind, and where the GPU stood idle in them."""
    import torch
    from idle import print_idle
    from profile_step import kind_of, print_kernels
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(count - PROFILED + 1, count + 1):
            step(number)
        torch.cuda.synchronize()
    print_kernels(profiler.key_averages(), milliseconds / 1000, PROFILED, 30)
    print_idle(profiler.events(), kind_of, PROFILED)


def found_by(row: str, end: tuple[int, list[str], str]) -> dict[str, Any]:
    """What the process of a row found, printed."""
    code, said, errors = end
    for line in said[:-1]:
        print(f"    {line}")
    if code or not said:
        tail = "\n".join(errors.splitlines()[-25:])
        print(f"{row} failed ({code}):\n{tail}", flush=True)
        return {"row": row, "error": tail}
    found: dict[str, Any] = json.loads(said[-1])
    if row == FLOOR:
        parts = ", ".join(f"{part} {value:.1f} ms" for part, value in found["floor"].items())
        print(f"floor: {parts}", flush=True)
        return found
    print(
        f"{found['name']}: {found['milliseconds']:.1f} ms, "
        f"{found['tokens_per_second']:,.0f} tokens/s, {gib(found['peak_gib'])} GiB, host "
        f"{found['host_milliseconds']:.0f} ms, losses {found['losses']}, "
        f"built in {found['build_seconds']:.0f} s, first step {found['first_step_seconds']:.0f} s",
        flush=True,
    )
    return found


def command_of(chosen: argparse.Namespace, row: str) -> list[str]:
    command = [sys.executable, str(FOLDER / "train_peers.py"), "--row", row]
    for name in ("shape", "steps", "warm_up", "batch", "length", "precision"):
        command += [f"--{name.replace('_', '-')}", str(getattr(chosen, name))]
    switches = {"--profile": chosen.profile, "--dry-run": chosen.dry_run}
    return command + [name for name, is_on in switches.items() if is_on]


def rows_of(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Those that are asked for; what is no row, or cannot run there, is refused."""
    if chosen.dry_run and chosen.profile:
        parser.error("--profile looks at a GPU, which --dry-run has none of")
    if chosen.rows is None:
        default = DEFAULT_ROWS.split(",")
        return [row for row in default if not (chosen.dry_run and row in ON_A_GPU_ONLY)]
    rows = [name.strip() for name in chosen.rows.split(",")]
    for row in rows:
        if row not in ROW_NAMES:
            parser.error(f"{row} is no row; there are {', '.join(ROW_NAMES)}")
        if chosen.dry_run and row in ON_A_GPU_ONLY:
            parser.error(f"{row} needs a GPU, and --dry-run is on a CPU")
    return rows


def by_row(
    results: list[dict[str, Any]],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """What ran, by row; and the floor, empty where it was not measured."""
    rows: dict[str, list[dict[str, Any]]] = {}
    floor: dict[str, float] = {}
    for found in results:
        if "error" in found:
            continue
        if found["row"] == FLOOR:
            floor = found["floor"]
        else:
            rows.setdefault(found["row"], []).append(found)
    return rows, floor


def gib(peak: float | None) -> str:
    return "no" if peak is None else f"{peak:.1f}"


def speed(group: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the repeats of a row: the median of tokens a second, and half of their range."""
    values = [found["tokens_per_second"] for found in group]
    return statistics.median(values), (max(values) - min(values)) / 2


def judged(results: list[dict[str, Any]], targets: str) -> list[str]:
    """A line for each of ``targets`` (``row=33500`` or ``row=1.5*other``, separated by commas)."""
    rows, _ = by_row(results)
    lines = []
    for target in filter(None, targets.split(",")):
        row, wanted = target.strip().split("=")
        times, _, other = wanted.partition("*")
        if row not in rows or (other and other not in rows):
            lines.append(f"{target}: not known, a row of it did not run")
            continue
        median, off = speed(rows[row])
        least = float(times) * (speed(rows[other])[0] if other else 1.0)
        reached = REACHED if median - off >= least else "MISSED"
        lines.append(f"{target}: {reached}, {median:,.0f} - {off:,.0f} to {least:,.0f}")
    return lines


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; the ratio is to Accelerate, or to the slowest where it did not run."""
    rows, floor = by_row(results)
    if not rows:
        return "no row ran"
    medians = {row: speed(group)[0] for row, group in rows.items()}
    base = "accelerate" if "accelerate" in medians else min(medians, key=lambda row: medians[row])
    named = rows[base][0]["name"]
    lines = [
        f"| row | ms | tokens/s | +- | peak GiB | host ms | to {named} | of floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, group in rows.items():
        off = speed(group)[1]
        milliseconds, host = (
            statistics.median(found[key] for found in group)
            for key in ("milliseconds", "host_milliseconds")
        )
        peak = max((found["peak_gib"] for found in group), key=lambda value: value or 0.0)
        least = floor.get("bf16" if row in IN_BF16 else "fp8")
        share = "" if least is None else f"{least / milliseconds:.0%}"
        lines.append(
            f"| {group[0]['name']} | {milliseconds:.1f} | {medians[row]:,.0f} | {off:,.0f} | "
            f"{gib(peak)} | {host:.0f} | {medians[row] / medians[base]:.2f} | {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--rows", help=f"by commas; {DEFAULT_ROWS} of {', '.join(ROW_NAMES)}")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--at-least", default="", help="targets of rows, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        vars(chosen).update(DRY)
    if chosen.row:
        print(json.dumps(run_row(chosen, wait_for_turn)))
        return
    rows = rows_of(chosen, parser)
    # The floor is of the GPU and needs no repeats.
    later = [row for row in rows if row != FLOOR]
    turns = rows + later * (chosen.repeats - 1)
    places = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    ends = ends_of([command_of(chosen, row) for row in turns], environment)
    results: list[dict[str, Any]] = []
    for row, end in zip(turns, ends, strict=True):
        results.append(found_by(row, end))
        if chosen.out is not None:
            chosen.out.write_text(json.dumps({"shape": chosen.shape, "rows": results}, indent=1))
    print(
        f"\n{chosen.shape}, {chosen.batch} x {chosen.length} tokens, {chosen.precision} weights\n"
    )
    print(table(results))
    verdicts = judged(results, chosen.at_least)
    for verdict in verdicts:
        print(verdict)
    failed = any("error" in found for found in results)
    if failed or not all(f": {REACHED}, " in verdict for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
