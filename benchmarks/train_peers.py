"""Training steps a second on one GPU, beside the peers: same shape, same text, same settings.

    python benchmarks/train_peers.py [--shape 3b] [--rows fused,fused_head,plain,bf16,accelerate]
        [--steps 15] [--warm-up 10] [--repeats 1] [--precision bf16] [--profile] [--out FILE.json]

Every row runs in a process of its own, one after another, ``--repeats`` times in turn: 2 x 4096
tokens of real text (bytes of Python's standard library) a step, random weights in bf16 (or fp32
under bf16 autocast), AdamW with states in the format of the weights, clipping at norm 1. Prints
tokens a second (of the median step; of several repeats their median, and the spread), the peak of
allocated memory, the host's time to enqueue a step, and the ratio to the first peer. With
``--profile`` three more steps run under torch's profiler, and kernels by kind are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SHAPES = ("60m", "125m", "350m", "1b", "3b", "8b")
PROFILED = 3
DEFAULT_ROWS = "fused,fused_head,plain,bf16,accelerate"


def run_row(chosen: argparse.Namespace) -> dict[str, Any]:
    """Trains one row in this process."""
    import torch
    from peers.training_rows import ROWS, Work, real_text

    count = chosen.warm_up + chosen.steps
    tokens = real_text(count, chosen.batch, chosen.length)
    work = Work(chosen.shape, chosen.batch, chosen.length, tokens, chosen.precision)
    started = time.perf_counter()
    step = ROWS[chosen.row][1](work)
    built = time.perf_counter() - started
    events, enqueued, losses = [], [], []
    for number in range(1, count + 1):
        if number == min(3, count):
            torch.cuda.reset_peak_memory_stats()
        before = time.perf_counter()
        losses.append(step(number))
        enqueued.append(time.perf_counter() - before)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    spans = pairwise(events)
    milliseconds = [a.elapsed_time(b) for a, b in spans][chosen.warm_up - 1 :]
    median = statistics.median(milliseconds)
    if chosen.profile:
        print_profile(step, count, median)
    return {
        "row": chosen.row,
        "name": ROWS[chosen.row][0],
        "milliseconds": median,
        "tokens_per_second": chosen.batch * chosen.length * 1000 / median,
        "spread": (max(milliseconds) - min(milliseconds)) / median,
        "peak_gib": peak / 2**30,
        "host_milliseconds": statistics.median(enqueued[chosen.warm_up :]) * 1000,
        "build_seconds": built,
        "losses": [round(float(losses[i]), 4) for i in (0, count // 2, count - 1)],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def print_profile(step: Callable[[int], Any], count: int, milliseconds: float) -> None:
    """The kernels of the last steps once more, by kind."""
    import torch
    from profile_step import print_kernels
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(count - PROFILED + 1, count + 1):
            step(number)
        torch.cuda.synchronize()
    print_kernels(profiler.key_averages(), milliseconds / 1000, PROFILED, 30)


def in_a_process(chosen: argparse.Namespace, row: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / "train_peers.py"), "--row", row]
    for name in ("shape", "steps", "warm_up", "batch", "length", "precision"):
        command += [f"--{name.replace('_', '-')}", str(getattr(chosen, name))]
    command += ["--profile"] if chosen.profile else []
    places = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()
    for line in said[:-1]:
        print(f"    {line}")
    if done.returncode or not said:
        tail = "\n".join(done.stderr.strip().splitlines()[-25:])
        print(f"{row} failed ({done.returncode}):\n{tail}", flush=True)
        return {"row": row, "error": tail}
    found: dict[str, Any] = json.loads(said[-1])
    print(
        f"{found['name']}: {found['milliseconds']:.1f} ms, "
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_gib']:.1f} GiB, host "
        f"{found['host_milliseconds']:.0f} ms, losses {found['losses']}, "
        f"built in {found['build_seconds']:.0f} s",
        flush=True,
    )
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; the ratio is to Accelerate, or to the slowest where it did not run."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for found in results:
        if "error" not in found:
            rows.setdefault(found["row"], []).append(found)
    if not rows:
        return "no row ran"
    speeds: dict[str, list[float]] = {
        row: [found["tokens_per_second"] for found in group] for row, group in rows.items()
    }
    medians = {row: statistics.median(values) for row, values in speeds.items()}
    base = "accelerate" if "accelerate" in medians else min(medians, key=lambda row: medians[row])
    lines = [
        f"| row | ms | tokens/s | +- | peak GiB | host ms | to {rows[base][0]['name']} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, group in rows.items():
        off = (max(speeds[row]) - min(speeds[row])) / 2
        milliseconds, host = (
            statistics.median(found[key] for found in group)
            for key in ("milliseconds", "host_milliseconds")
        )
        peak = max(found["peak_gib"] for found in group)
        lines.append(
            f"| {group[0]['name']} | {milliseconds:.1f} | {medians[row]:,.0f} | {off:,.0f} | "
            f"{peak:.1f} | {host:.0f} | {medians[row] / medians[base]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="names, separated by commas")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(run_row(chosen)))
        return
    results: list[dict[str, Any]] = []
    for _ in range(chosen.repeats):
        for row in chosen.rows.split(","):
            results.append(in_a_process(chosen, row.strip()))
            if chosen.out is not None:
                chosen.out.write_text(
                    json.dumps({"shape": chosen.shape, "rows": results}, indent=1)
                )
    print(
        f"\n{chosen.shape}, {chosen.batch} x {chosen.length} tokens, {chosen.precision} weights\n"
    )
    print(table(results))


if __name__ == "__main__":
    main()
