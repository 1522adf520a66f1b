"""Delayed-scaling state of the te engine: one place for te.Linear's buffers and for our own.

``te.Linear`` keeps its histories and scales in ``fp8_meta``; ``OverrideLinear`` has none of its
own. Both are seen here as a pair of `DirectionState` (forward: input, weight, output; backward:
grad_output, grad_input), so that ``interval``, health and checkpoints treat them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORWARD_COLUMNS = ("input", "weight", "output")
BACKWARD_COLUMNS = ("grad_output", "grad_input")


@dataclass
class DirectionState:
    """Scales ``[columns]`` and amax histories ``[length, columns]`` (fp32) of one layer."""

    scale: Tensor
    amax_history: Tensor


class ForwardScales:
    """The forward scales of every layer as they were when this was made, in one copy."""

    def __init__(self, states: dict[str, DirectionState]) -> None:
        self._places = {name: place for place, name in enumerate(states)}
        self._scales = torch.stack([state.scale for state in states.values()]).detach()

    def __getitem__(self, name: str) -> Tensor:
        """The scales ``[columns]`` of one layer."""
        return self._scales[self._places[name]]


@dataclass
class OwnDelayedState:
    """Histories and scales of the layers that Transformer Engine does not keep them for."""

    history_length: int
    margin: int
    algorithm: str
    forward_dtype: Any
    backward_dtype: Any
    device: torch.device
    forward: dict[str, DirectionState] = field(default_factory=dict)
    backward: dict[str, DirectionState] = field(default_factory=dict)

    def add(self, name: str) -> None:
        for states, columns in ((self.forward, FORWARD_COLUMNS), (self.backward, BACKWARD_COLUMNS)):
            states[name] = DirectionState(
                torch.ones(len(columns), dtype=torch.float32, device=self.device),
                torch.zeros(
                    self.history_length, len(columns), dtype=torch.float32, device=self.device
                ),
            )

    def forget(self, name: str) -> None:
        for states in (self.forward, self.backward):
            states.pop(name, None)

    def quantizer(self, name: str, tensor: str, first_run: ForwardScales | None) -> Any:
        """That of a layer's ``input``, ``weight`` or ``grad_output``, which stages its amax.

        ``first_run``: of what is computed again, the scales it was cast with; it stages nothing.
        """
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

        if tensor == "grad_output":
            state, column, dtype = self.backward[name], 0, self.backward_dtype
        else:
            state, dtype = self.forward[name], self.forward_dtype
            column = FORWARD_COLUMNS.index(tensor)
        scale, staged = state.scale[column], state.amax_history[0][column].reshape(1)
        if first_run is not None and tensor != "grad_output":
            scale, staged = first_run[name][column], torch.zeros_like(staged)
        return Float8Quantizer(scale, staged, dtype)

    def update(self, forward: bool, share: Callable[[Tensor], None] = lambda amaxes: None) -> None:
        """Rotate the histories and recompute the scales, with Transformer Engine's own kernel.

        ``share``: gets the staged amaxes of all layers, fp32 in one row, to put into their place
        the largest ones of all ranks; the kernel prefers what it is given to what is staged.
        """
        states = self.forward if forward else self.backward
        if not states:
            return
        import transformer_engine_torch as tex

        amaxes = torch.cat([state.amax_history[0] for state in states.values()])
        share(amaxes)
        tex.fused_amax_and_scale_update_after_reduction(
            amaxes,
            [state.amax_history for state in states.values()],
            [state.scale for state in states.values()],
            self.algorithm,
            self.forward_dtype if forward else self.backward_dtype,
            self.margin,
        )


class ScaleInterval:
    """Gives ``interval`` its meaning: scales change at the first, then each ``interval``-th update.

    Transformer Engine recomputes scales at each update. On the updates between, the scales held
    from the last due one are put back; the histories have advanced all the same.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.updates = {"forward": 0, "backward": 0}
        self._held: dict[str, dict[str, Tensor]] = {"forward": {}, "backward": {}}

    def after_update(self, direction: str, scales: Mapping[str, Tensor]) -> None:
        """Call once after each update of ``direction``, with the scales of each layer.

        A layer seen for the first time between two due updates starts from scale 1, as before its
        first update.
        """
        due = self.updates[direction] % self.interval == 0
        self.updates[direction] += 1
        if self.interval == 1:
            return
        if due:
            self.hold(direction, scales)
            return
        if not scales:
            return
        held = self._held[direction]
        for name, scale in scales.items():
            if name not in held:
                held[name] = torch.ones_like(scale)
        torch._foreach_copy_(list(scales.values()), [held[name] for name in scales])

    def hold(self, direction: str, scales: Mapping[str, Tensor]) -> None:
        """Take ``scales`` as the last due ones: they are, or they come from a checkpoint."""
        self._held[direction] = {name: scale.clone() for name, scale in scales.items()}


def te_directions(modules: dict[str, Any]) -> Iterator[tuple[str, str, DirectionState]]:
    """(layer, "forward" or "backward", state) of every module of te whose FP8 state exists.

    One with several GEMMs (see ``gemms_of``) counts as so many layers, each with its columns.
    """
    directions = (
        ("forward", "scaling_fwd", len(FORWARD_COLUMNS)),
        ("backward", "scaling_bwd", len(BACKWARD_COLUMNS)),
    )
    for name, module in modules.items():
        gemms = gemms_of(module)
        for direction, key, columns in directions:
            state = module.fp8_meta.get(key)
            if state is None or getattr(state, "amax_history", None) is None:
                continue
            if len(gemms) == 1:
                yield name + gemms[0], direction, DirectionState(state.scale, state.amax_history)
                continue
            for index, gemm in enumerate(gemms):
                own = slice(index * columns, (index + 1) * columns)
                yield (
                    name + gemm,
                    direction,
                    DirectionState(state.scale[own], state.amax_history[:, own]),
                )


def gemms_of(module: Any) -> tuple[str, ...]:
    """What the names of its GEMMs add to the name of a module of te, in their order."""
    gemms: tuple[str, ...] = module.__dict__.get("_gemms", ("",))
    return gemms


def infinities(
    states: dict[str, DirectionState], columns: tuple[str, ...]
) -> tuple[list[str], Tensor | None]:
    """``fp8/<layer>/<column>/infinities`` of every history, and the counts of infinite amaxes in
    that order: int64; None where there is no history."""
    if not states:
        return [], None
    histories = torch.stack([state.amax_history for state in states.values()])
    counts = torch.isinf(histories).sum(dim=1)
    names = [f"fp8/{name}/{column}/infinities" for name in states for column in columns]
    return names, counts.flatten()


def forget_modules() -> None:
    """Transformer Engine forgets the FP8 state of every module that ran in this process."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def scale_gradients() -> None:
    """What Transformer Engine's first Linear in a backward pass does at its end: new scales."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
