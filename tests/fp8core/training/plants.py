"""What tests plant in a run once it is assembled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fp8core.engines.emulated_layers import EmulatedLinear
from fp8core.training.assemble import Assembled
from fp8core.training.stopping import StopRequest

__all__ = ["spoil_in_fp8", "stop_in_step"]


def stop_in_step(number: int, stop: StopRequest) -> Callable[[Assembled], None]:
    """Asks for a stop while the gradients of that step are computed."""

    def plant(assembled: Assembled) -> None:
        compute = assembled.learner.gradients

        def asked(step: int, *arguments: Any, **options: Any) -> Tensor:
            stop.requested = step == number
            return compute(step, *arguments, **options)

        assembled.learner.gradients = asked  # type: ignore[method-assign]

    return plant


def spoil_in_fp8(assembled: Assembled, layer: str) -> None:
    """In training the layer gives infinities for as long as it computes in `emulated`'s FP8."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        bad = isinstance(module, EmulatedLinear) and module.training
        return output * float("inf") if bad else None

    assembled.learner.model.get_submodule(layer).register_forward_hook(hook)
