"""Where the time of a training step goes on a GPU: kernels by kind, and the host's functions.

    python benchmarks/profile_step.py SPEC.json [--steps 10] [--warm-up 20] [--rows 12] [--host]

Trains a spec through the product's own loop. After the warm-up it times ``--steps`` steps without
a profiler, then as many under torch's profiler, and ends the run. Prints a step's milliseconds, how
much of them the GPU computed, its kernels by kind with their shares, the longest of them by name,
and between which the GPU stood idle; with ``--host`` the functions in which the training thread
spent its time.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from idle import print_idle
from torch.profiler import ProfilerActivity, profile

from fp8core.commands.train import run_train
from fp8core.training.loop import TrainingLoop

KINDS = (
    ("FP8 GEMM", r"nvjet_sm\d+_q|scaled_mm|gemm.*e4m3|float8.*gemm"),
    ("16- and 32-bit GEMM", r"nvjet|gemm|cutlass.*(bf16|tf32|f32)|xmma"),
    ("attention", r"flash|fmha|attention|cudnn"),
    ("norms", r"rmsnorm|layernorm|rms_norm|layer_norm|normalization|ln_tma_|ln_bwd_"),
    ("activations", r"gated_act|silu|gelu"),
    ("rotary embedding", r"rope|^_split$"),
    ("loss", r"cross_entropy|softmax|nll"),
    ("update and norm of gradients", r"^_step$|adam|multi_tensor|foreach|lpnorm"),
    ("casts and scales", r"quantize|cast|transpose|amax|scale|float8|e4m3|e5m2"),
    ("FP8 health", r"_count"),
    ("copies", r"memcpy|memset|copy"),
)


class Profiled(BaseException):
    """The steps that were asked for are over."""


def kind_of(kernel: str) -> str:
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "elementwise and the rest"


class Steps:
    """Stands in for the loop's step: counts, times, profiles."""

    def __init__(self, warm_up: int, steps: int, host: bool) -> None:
        self._warm_up, self._steps, self._host = warm_up, steps, host
        self._number = 0
        self._started = 0.0
        self._profiler: Any = None
        self.functions = cProfile.Profile()
        self.plain_seconds = 0.0
        self.events: Sequence[Any] = ()
        self.timeline: Sequence[Any] = ()

    def __call__(self, original: Any, *arguments: Any) -> None:
        first, second = self._warm_up, self._warm_up + self._steps
        if self._number == first:
            torch.cuda.synchronize()
            self._started = time.perf_counter()
        if self._number == second:
            torch.cuda.synchronize()
            self.plain_seconds = (time.perf_counter() - self._started) / self._steps
            if self._host:
                self.functions.enable()
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.__enter__()
        if self._number == second + self._steps:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            self.functions.disable()
            self.events = self._profiler.key_averages()
            self.timeline = self._profiler.events()
            raise Profiled
        self._number += 1
        original(*arguments)


def print_kernels(events: Sequence[Any], seconds: float, count: int, rows: int) -> None:
    """Of ``count`` steps; ``seconds``: what one takes without a profiler."""
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = {}
    for event in events:
        milliseconds = event.self_device_time_total / 1000 / count
        if milliseconds > 0:
            kinds[kind_of(event.key)] += milliseconds
            kernels[event.key] = milliseconds
    wall, busy = seconds * 1000, sum(kinds.values())
    print(f"a step: {wall:.2f} ms, of which the GPU computes {busy:.2f} ms")
    for kind, milliseconds in sorted(kinds.items(), key=lambda pair: -pair[1]):
        print(f"  {milliseconds:8.2f} ms  {milliseconds / busy:6.1%}  {kind}")
    for kernel, milliseconds in sorted(kernels.items(), key=lambda pair: -pair[1])[:rows]:
        print(f"  {milliseconds:8.3f} ms  [{kind_of(kernel)}]  {kernel[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--host", action="store_true")
    chosen = parser.parse_args()
    steps = Steps(chosen.warm_up, chosen.steps, chosen.host)
    original = TrainingLoop._step
    TrainingLoop._step = lambda *arguments: steps(original, *arguments)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_train(chosen.spec, Path(folder, "run"), [], debug=True)
        except Profiled:
            pass
    print_kernels(steps.events, steps.plain_seconds, chosen.steps, chosen.rows)
    print_idle(steps.timeline, kind_of, chosen.steps)
    if chosen.host:
        text = io.StringIO()
        pstats.Stats(steps.functions, stream=text).sort_stats("tottime").print_stats(
            chosen.rows * 2
        )
        print(text.getvalue())


if __name__ == "__main__":
    main()
