"""What recording costs a training step: python benchmarks/telemetry.py [--device cuda]

A loop records 20 scalars, once as tensors of the device and once as floats, and works for the rest
of a 100 ms step, as a training loop does: only the time inside ``record()`` is counted. The goal is
0.5 % of the step, 500 microseconds. On a GPU the work is kernels in flight, so a ``record()`` that
waited for the device would show. The row "nothing" times as much arithmetic in its place: what
it shows beyond its median is the machine's other work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fp8core.telemetry import TelemetryWriter

SCALARS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    print(f"{SCALARS} scalars, {arguments.steps} steps of {arguments.step_seconds * 1e3:.0f} ms")
    for kind in ("tensors", "floats", "nothing"):
        times = measure(kind, device, arguments.steps, arguments.step_seconds)
        median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        share = median / arguments.step_seconds
        print(
            f"{kind:>8} on {device.type}: median {median * 1e6:6.1f} us, p99 {p99 * 1e6:6.1f} us, "
            f"{share:.3%} of a step (p99 {p99 / arguments.step_seconds:.3%})"
        )


def measure(kind: str, device: torch.device, steps: int, step_seconds: float) -> list[float]:
    """Seconds inside ``record()`` in each step."""
    tensors = [torch.rand((), device=device) for _ in range(SCALARS)]
    work = torch.rand(2048, 2048, device=device) if device.type == "cuda" else torch.rand(128, 128)
    times = []
    with (
        tempfile.TemporaryDirectory() as folder,
        TelemetryWriter(Path(folder) / "telemetry.jsonl") as telemetry,
    ):
        for step in range(-10, steps):  # ten to warm up
            end = time.perf_counter() + step_seconds
            values: dict[str, float | torch.Tensor] = {
                f"train/figure_{number}": tensor if kind == "tensors" else step + number / 7
                for number, tensor in enumerate(tensors)
            }
            if device.type == "cuda":
                for _ in range(200):
                    work @ work
            started = time.perf_counter()
            if kind == "nothing":
                sum(number * number for number in range(3000))
            else:
                telemetry.record(step, values)
            passed = time.perf_counter() - started
            if step >= 0:
                times.append(passed)
            while time.perf_counter() < end:
                work @ work
                if device.type == "cuda":
                    torch.cuda.synchronize()
    return times


if __name__ == "__main__":
    main()
