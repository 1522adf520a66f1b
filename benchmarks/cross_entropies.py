"""The loss of a language model by Octrain's kernel, Transformer Engine's and liger-kernel's.

    python benchmarks/cross_entropies.py [--tokens 8192] [--classes 128256] [--hidden 3072]

Two tables, each of forward and backward: of bf16 logits alone, and of the head's GEMM with its loss
(where liger has a form that makes the logits a chunk at a time). Each with milliseconds (median of
ten, CUDA events), the memory that it needs beyond what goes in, and by how much the gradient
differs, in 2-norm, from that of PyTorch's on fp32 logits, the row ``plain``. What is not installed
is named and left out; liger-kernel is no dependency: ``pip install liger-kernel``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8core.fusion.cross_entropy import plain_cross_entropy
from fp8core.fusion.cross_entropy_kernel import sum_of_cross_entropies

IGNORED, REPEATS, WARM_UP = -100, 10, 3

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [tokens, classes] bf16, targets [tokens]) to the sum of their cross-entropies."""

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [tokens, width] bf16, weight [classes, width] bf16, targets) to the same."""


def octrain(logits: Tensor, targets: Tensor) -> Tensor:
    return sum_of_cross_entropies(logits, targets, IGNORED)


def transformer_engine(*, overwrite: bool) -> Loss:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = parallel_cross_entropy(
            logits[None], targets[None], ignore_idx=IGNORED, overwrite_input=overwrite
        ).sum()
        return found

    return loss


def liger() -> Loss:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = liger_cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return found

    return loss


def liger_with_head() -> HeadLoss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = liger_fused_linear_cross_entropy(
            hidden, weight, targets, ignore_index=IGNORED, reduction="sum"
        )
        return found

    return loss


def with_head(loss: Loss) -> HeadLoss:
    return lambda hidden, weight, targets: loss(torch.nn.functional.linear(hidden, weight), targets)


def losses() -> dict[str, Loss]:
    made: dict[str, Callable[[], Loss]] = {
        "plain": lambda: plain_cross_entropy,
        "Octrain": lambda: octrain,
        "Transformer Engine": lambda: transformer_engine(overwrite=False),
        "Transformer Engine, over its input": lambda: transformer_engine(overwrite=True),
        "liger": liger,
    }
    return dict(_those_there_are(made))


def _those_there_are(made: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found = {}
    for name, make in made.items():
        try:
            found[name] = make()
        except (ImportError, RuntimeError) as error:
            print(f"{name} is not measured: {error}")
    return found


def measured(
    name: str, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], targets: Tensor
) -> tuple[str, list[Tensor]]:
    """A row of a table, and every sixteenth row of the gradients of ``inputs``, in fp32."""
    given = [value.detach().requires_grad_() for value in inputs]
    milliseconds: list[float] = []
    peak = 0.0
    gradients: list[Tensor] = []
    for number in range(WARM_UP + REPEATS):
        # As from a layer: some write their gradient over the logits, which no leaf would allow.
        passed = [given[0] * 1.0, *given[1:]]
        gradients = []
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = run(*passed, targets)
        gradients = list(torch.autograd.grad(loss, passed))
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            milliseconds.append(begin.elapsed_time(end))
            peak = max(peak, (torch.cuda.max_memory_allocated() - before) / 2**30)
        del passed, loss
    row = f"| {name} | {statistics.median(milliseconds):.2f} | {peak:.2f} |"
    return row, [gradient[::16].float() for gradient in gradients]


def table(
    title: str, runs: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...], targets: Tensor
) -> None:
    print(f"\n{title}\n\n| | ms | GiB beyond what goes in | gradient off by |\n|---|---|---|---|")
    exact: list[Tensor] = []
    for name, run in runs.items():
        row, gradients = measured(name, run, inputs, targets)
        exact = exact or gradients
        off = max(
            float((own - other).norm() / other.norm())
            for own, other in zip(gradients, exact, strict=True)
        )
        print(f"{row} {off:.1e} |", flush=True)
        del gradients
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=3072)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(chosen.tokens, chosen.hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(chosen.classes, chosen.hidden, device=device, dtype=torch.bfloat16)
    weight *= 2 / chosen.hidden**0.5
    targets = torch.randint(0, chosen.classes, (chosen.tokens,), device=device)
    targets[: chosen.tokens // 16] = IGNORED
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sizes = f"{chosen.tokens} tokens, {chosen.classes} classes"
    found = losses()
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden, weight)
    table(f"{sizes}, bf16 logits", dict(found), (logits,), targets)
    del logits
    heads: dict[str, Callable[..., Tensor]] = {
        name: with_head(loss) for name, loss in found.items()
    }
    heads |= _those_there_are({"liger, logits by chunks": liger_with_head})
    table(f"the same with a head of {chosen.hidden}, in bf16", heads, (hidden, weight), targets)


if __name__ == "__main__":
    main()
