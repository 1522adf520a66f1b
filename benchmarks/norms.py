"""Norms by Transformer Engine's own kernels beside cuDNN's, by width: where which is faster.

    python benchmarks/norms.py [--widths 768,...,8192] [--tokens 8192] [--repeats 20]

Forward goes to FP8 with a delayed scale (``fp8``), to FP8 with the scale of the tensor itself
(``current``), and stays in bf16 (``bf16``); backward is always of bf16. Each in microseconds on the
GPU alone: the host enqueues all calls while the GPU still waits. The kernels are chosen as a job's
process chooses them (`fp8core.engines.te_norms`). Printed too is how far the two are apart: the
largest difference of the outputs and gradients, as a share of the largest value.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401 - before the extension, which needs its libraries
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

from fp8core.engines.te_norms import use_cudnn

WIDTHS = "768,1024,1536,2048,2304,2560,3072,3584,4096,5120,6144,8192"
EPSILON = 1e-5
BF16 = tex.DType.kBFloat16


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, the median of five rounds of ``repeats``."""
    call()
    rounds: list[float] = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)
        began.record()
        for _ in range(repeats):
            call()
        ended.record()
        torch.cuda.synchronize()
        rounds.append(began.elapsed_time(ended) / repeats * 1000)
    return statistics.median(rounds)


class Norm:
    """One norm of ``tokens`` by ``width``, RMSNorm or LayerNorm."""

    def __init__(self, kind: str, tokens: int, width: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        self.x, self.gradient = drawn(tokens, width), drawn(tokens, width)
        self.weight, self.bias = drawn(width), drawn(width)
        self.rms = kind == "rms_norm"

    def forward(self, quantizer: Any) -> Any:
        if self.rms:
            return tex.rmsnorm_fwd(self.x, self.weight, EPSILON, None, quantizer, BF16, 0, False)
        return tex.layernorm_fwd(
            self.x, self.weight, self.bias, EPSILON, None, quantizer, BF16, 0, False
        )

    def backward(self, kept: tuple[Any, Any]) -> list[Tensor]:
        mean, deviation = kept
        if self.rms:
            found = tex.rmsnorm_bwd(self.gradient, self.x, deviation, self.weight, 0, False)
        else:
            found = tex.layernorm_bwd(self.gradient, self.x, mean, deviation, self.weight, 0, False)
        return list(found)


def quantizers() -> dict[str, Any]:
    e4m3 = tex.DType.kFloat8E4M3
    scale, amax = torch.full((1,), 16.0, device="cuda"), torch.zeros(1, device="cuda")
    return {
        "fp8": Float8Quantizer(scale, amax, e4m3),
        "current": Float8CurrentScalingQuantizer(e4m3, torch.device("cuda")),
        "bf16": None,
    }


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    return max(
        ((a.float() - b.float()).abs().max() / a.float().abs().max()).item()
        for a, b in zip(first, second, strict=True)
    )


def measured(norm: Norm, repeats: int) -> tuple[dict[str, float], list[Tensor], Tensor]:
    """Microseconds; output and gradients in bf16; the amax that a cast with a delayed scale saw."""
    times = {}
    casts = quantizers()
    for name, quantizer in casts.items():
        times[name] = microseconds(partial(norm.forward, quantizer), repeats)
    output, *kept = norm.forward(None)
    times["backward"] = microseconds(lambda: norm.backward((kept[0], kept[1])), repeats)
    return times, [output, *norm.backward((kept[0], kept[1]))], casts["fp8"].amax.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default=WIDTHS)
    parser.add_argument("--kinds", default="rms_norm,layer_norm")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    chosen = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chosen.tokens} tokens")
    print("microseconds, Transformer Engine's kernels / cuDNN's")
    for kind in chosen.kinds.split(","):
        for width in map(int, chosen.widths.split(",")):
            norm = Norm(kind, chosen.tokens, width)
            use_cudnn(forward=False, backward=False)
            own, values, amax = measured(norm, chosen.repeats)
            use_cudnn(forward=True, backward=True)
            other, others, other_amax = measured(norm, chosen.repeats)
            cells = "  ".join(f"{name} {own[name]:6.1f} /{other[name]:6.1f}" for name in own)
            print(
                f"{kind:10} {width:5}  {cells}  apart {apart(values, others):.1e}, amax "
                f"{apart([amax], [other_amax]):.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
