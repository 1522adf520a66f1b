"""What ``override_linear_precision`` costs on a GPU: one Linear, forward and backward, per tuple.

    python benchmarks/override_cost.py

Prints, for a Linear large enough that the GPU and not Python is timed (16384 tokens, 8192 to 8192),
the median time of a step as a ratio to ``nn.Linear`` under bf16 autocast in the same run, for each
of the eight tuples and for ``te.Linear`` itself called without this project.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import transformer_engine
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

from fp8core.engines.transformer_engine import TransformerEngine
from fp8core.spec.recipe import TEDelayed

TOKENS, IN, OUT, REPEATS, INNER = 16384, 8192, 8192, 5, 20


def milliseconds(step: Callable[[], None]) -> float:
    for _ in range(5):
        step()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(INNER):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / INNER)
    return statistics.median(times)


def linear() -> nn.Linear:
    return nn.Linear(IN, OUT, bias=False, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(TOKENS, OUT, device="cuda", dtype=torch.bfloat16)

    plain = linear()

    def bf16() -> None:
        plain(x).backward(gradient)

    peer = te.Linear(IN, OUT, bias=False, params_dtype=torch.bfloat16)
    recipe = DelayedScaling(amax_history_len=16)

    def te_linear() -> None:
        with te.autocast(enabled=True, recipe=recipe):
            y = peer(x)
        y.backward(gradient)

    baseline = milliseconds(bf16)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Transformer Engine {transformer_engine.__version__}"
    )
    print(f"nn.Linear bf16: {baseline:.3f} ms; {TOKENS} x {IN} -> {OUT}, median of {REPEATS}")
    print(f"te.Linear alone           {milliseconds(te_linear) / baseline:.2f}")
    for override in itertools.product((False, True), (False, True), (False, True)):
        engine = TransformerEngine(
            TEDelayed(amax_history_len=16, override_linear_precision=override),
            torch.device("cuda"),
        )
        original = linear()
        refusal = engine.linear_refusal(original)
        if refusal:
            print(f"{override!s:25} kept in bf16: {refusal}")
            continue
        layer = engine.convert_linear(original, "layer")

        def step(engine: TransformerEngine = engine, layer: nn.Module = layer) -> None:
            with engine.training_context():
                y = layer(x)
            y.backward(gradient)
            engine.after_backward()

        print(f"{override!s:25} {milliseconds(step) / baseline:.2f}")


if __name__ == "__main__":
    main()
