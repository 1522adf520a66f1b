"""Where a step went bad: the first layer whose output, or whose gradients, were not finite.

A step is computed once more, under hooks on every module, with the random numbers and, where they
were kept, the FP8 histories that it had the first time. Layers finish before the modules that hold
them, so the first one to finish with a bad output is the innermost at fault; a bad input tells that
the fault lies between the layers, in what the surrounding module computes by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.data.batch import Batch
from fp8core.training.learner import Learner
from fp8core.training.ranks.world import World

__all__ = ["Finding", "find_first_bad"]


@dataclass(frozen=True)
class Finding:
    """The first tensor that was not finite. ``layer``: its module's name, "" for the loss."""

    layer: str
    tensor: str
    micro_batch: int
    bad: int
    """How many of its ``size`` elements are not finite."""
    size: int
    rank: int | None = None
    """Whose micro-batch it was; None where one rank trains alone."""

    def __str__(self) -> str:
        where = f"{self.tensor} of {self.layer}" if self.layer else self.tensor
        return (
            f"the first tensor that is not finite is {where} ({self.bad} of {self.size} values, "
            f"micro-batch {self.micro_batch}{'' if self.rank is None else f' of rank {self.rank}'})"
        )


def find_first_bad(learner: Learner, step: int, batches: Sequence[Batch]) -> Finding | None:
    """Repeats ``step`` and says where it went bad; None where the repetition is finite.

    Of several ranks each repeats its own micro-batches, all of them to their end, for amaxes are
    exchanged on the way; all are told of the same tensor, the first in the order of micro-batches,
    then of ranks.

    Leaves gradients dropped and weights untouched; the engine's state advances as in any step.
    Waits for the device at every module. Raises what a step raises.
    """
    learner.drop_gradients()
    probe = _Probe()
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            probe.attached(learner.model),
        ):
            # Of modules whose inputs need no gradient: they are looked at all the same.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            between = probe.goes_on_to_the_end if learner.world.several else probe.goes_on
            loss = learner.gradients(step, batches, own=True, before=probe.begin, between=between)
    finally:
        learner.drop_gradients()
    finding = probe.finding
    if probe.interrupted:
        # The engine has entered a context whose backward pass never came.
        learner.engine.after_backward()
    elif finding is None and not bool(torch.isfinite(loss)):
        finding = Finding("", "the loss", len(batches), 1, 1)
    return _first_of_all(learner.world, finding) if learner.world.several else finding


def _first_of_all(world: World, finding: Finding | None) -> Finding | None:
    own = None if finding is None else asdict(replace(finding, rank=world.rank))
    found = [Finding(**each) for each in world.gather(own) if each is not None]
    return min(found, key=lambda each: (each.micro_batch, each.rank), default=None)


class _Probe:
    def __init__(self) -> None:
        self.finding: Finding | None = None
        self.interrupted = False
        self._micro_batch = 0
        self._forward = False

    def begin(self, number: int) -> None:
        self._micro_batch = number
        self._forward = True

    def goes_on(self, number: int) -> bool:
        self._forward = False
        self.interrupted = self.finding is not None
        return not self.interrupted

    def goes_on_to_the_end(self, number: int) -> bool:
        self._forward = False
        return True

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        handles: list[Any] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_hook(self._after_forward(name)))
                if not any(True for _ in module.children()):
                    handles.append(module.register_full_backward_hook(self._after_backward(name)))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook = self._after_gradient(names[id(parameter)])
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_forward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._forward or self.finding is not None:
                return
            for parameter_name, parameter in module.named_parameters(recurse=False):
                self._look(parameter, name, f"the parameter {parameter_name}")
            # Arguments by keyword are masks and the like, where infinity may have its place.
            self._look(args, name, "the input")
            self._look(output, name, "the output")

        return hook

    def _after_backward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            self._look(grad_output, name, "the gradient of the output")
            self._look(grad_input, name, "the gradient of the input")

        return hook

    def _after_gradient(self, name: str) -> Callable[[Tensor], None]:
        layer, _, parameter_name = name.rpartition(".")

        def hook(parameter: Tensor) -> None:
            self._look(parameter.grad, layer, f"the gradient of {parameter_name}")

        return hook

    def _look(self, values: Any, layer: str, what: str) -> None:
        if self.finding is not None:
            return
        for tensor in _tensors(values):
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            finite = torch.isfinite(tensor)
            if not bool(finite.all()):
                bad = int((~finite).sum())
                self.finding = Finding(layer, what, self._micro_batch, bad, tensor.numel())
                return


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values.detach()
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
