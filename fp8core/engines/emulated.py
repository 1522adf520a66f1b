"""The emulated engine: FP8 training with exact FP8 arithmetic in PyTorch, on any device.

It computes what Transformer Engine computes with delayed and with current scaling, and honours
every field of the recipe. When things happen, with delayed scaling:

* Casts of a training forward pass use the scales as they stood when the context was entered, and
  stage the amaxes. The forward histories are updated when the context is left, if gradients are
  then enabled.
* Casts of a backward pass use the gradients' scales and stage their amaxes; ``after_backward``
  updates them. Both happen for every micro-batch. Where several ranks train together, an update
  takes the largest of their amaxes: two small exchanges a micro-batch, as Transformer Engine has.
* A forward pass that runs inside a backward pass is the recomputation of gradient checkpointing,
  whichever library started it: it casts with the scales of the context it repeats, and stages
  nothing.
* Forward passes elsewhere run in high precision; the evaluation context runs them in FP8 where
  ``use_autocast_during_eval`` is set, with the present scales, and stages nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.emulated_layers import EmulatedLinear, EmulatedNorm, QuantizedTensor
from fp8core.engines.protocol import AmaxSharing, NormDescription
from fp8core.engines.state_check import check_state
from fp8core.numerics.casts import E4M3, E5M2, Float8Format, measure_amax, quantize
from fp8core.numerics.current_scaling import current_scale
from fp8core.numerics.delayed_scaling import AmaxHistories, AmaxHistory, DelayedScaling, Scales
from fp8core.numerics.float8_weight import Float8Weight
from fp8core.numerics.health import HealthRecorder
from fp8core.spec.recipe import TOKEN_MULTIPLE, EmulatedCurrent, EmulatedDelayed

__all__ = ["EmulatedEngine", "linear_refusal"]

DIMENSION_MULTIPLE = 16
"""FP8 GEMMs on a GPU need both dimensions of a weight to be a multiple of this."""

_FORWARD_COLUMNS = {"input": 0, "weight": 1}  # and 2, the output: FP8 outputs are never made
_BACKWARD_COLUMNS = {"grad_output": 0}  # and 1, the grad_input: likewise
_FORWARD_WIDTH, _BACKWARD_WIDTH = 3, 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Region:
    """One entry of a context: whether it casts, whether it is trained on, and the forward scales.

    ``scales`` is None where each cast finds its own (current scaling).
    """

    fp8: bool
    training: bool
    scales: Scales | None


class EmulatedEngine:
    """The engine for one model. Not safe to share between threads or models.

    ``autocast_dtype`` None leaves autocast alone: layers then compute in their input's dtype.
    """

    name = "emulated"
    token_multiple = TOKEN_MULTIPLE

    def __init__(
        self,
        recipe: EmulatedDelayed | EmulatedCurrent,
        device: torch.device,
        autocast_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.compute_dtype = torch.float32 if autocast_dtype is None else autocast_dtype
        self._autocast_dtype = autocast_dtype
        self.stores_powers_of_two = getattr(recipe, "use_power_2_scales", False)
        self._backward_format = E4M3 if recipe.fp8_format == "E4M3" else E5M2
        self._forward_histories: AmaxHistories | None = None
        self._backward_histories: AmaxHistories | None = None
        if isinstance(recipe, EmulatedDelayed):
            self._forward_histories = AmaxHistories(_scaling(recipe, E4M3), device)
            self._backward_histories = AmaxHistories(
                _scaling(recipe, self._backward_format), device
            )
        self._slots: dict[str, tuple[int, int]] = {}
        """First column of each module in the forward and in the backward histories."""
        self._region: _Region | None = None
        self._repeatable: _Region | None = None
        """The last context entered with gradients on: what a recomputation repeats."""
        self._backward_due = False
        self._ambiguous = False
        self._health: HealthRecorder | None = None
        self._share: Callable[[Tensor], None] = lambda staged: None

    # Conversion

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        return linear_refusal(linear)

    def norm_refusal(self, norm: NormDescription) -> str | None:
        for label, parameter in (("weight", norm.weight), ("bias", norm.bias)):
            if parameter is not None and tuple(parameter.shape) != norm.normalized_shape:
                shape = list(parameter.shape)
                return f"its {label} has shape {shape}, not {list(norm.normalized_shape)}"
        return None

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        if name in self._slots:
            raise ValueError(f"this engine already has a module named {name!r}")
        self._slots[name] = (
            0 if self._forward_histories is None else self._forward_histories.add(_FORWARD_WIDTH),
            0
            if self._backward_histories is None
            else self._backward_histories.add(_BACKWARD_WIDTH),
        )
        return EmulatedLinear(linear, name, self)

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        return EmulatedNorm(norm)

    def reads_stored_weights(self, module: nn.Module) -> bool:
        return isinstance(module, EmulatedLinear) and not any(self.recipe.override_linear_precision)

    # The step

    def share_amaxes(self, ranks: AmaxSharing) -> None:
        self._share = ranks.maximum

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do: the emulation runs eagerly."""

    def checkpoint_function(self) -> Callable[..., Any] | None:
        return None

    @contextmanager
    def training_context(self, first_microbatch: bool | None = None) -> Iterator[None]:
        with self._enter(_Region(fp8=True, training=True, scales=self._forward_scales())):
            yield
        if self._forward_histories is not None and torch.is_grad_enabled():
            self._forward_histories.update(self._share)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        fp8 = self.recipe.use_autocast_during_eval
        with self._enter(_Region(fp8=fp8, training=False, scales=self._forward_scales())):
            yield

    def after_backward(self) -> None:
        self._backward_due = self._ambiguous = False
        if self._backward_histories is not None:
            self._backward_histories.update(self._share)

    def linear_pass(self, name: str) -> _Pass | None:
        """How the Linear ``name`` runs now: the side of the engine that its layers see."""
        recomputing = _inside_backward()
        region = self._repeatable if recomputing else self._region
        if recomputing and self._ambiguous:
            raise RuntimeError(
                f"{name}: cannot recompute this activation: several forward passes with different "
                "scales wait for their backward pass, and which of them to repeat is not known. "
                "With gradient checkpointing, run the backward pass of a micro-batch, and "
                "after_backward(), before the next forward pass."
            )
        if region is None or not region.fp8:
            return None
        return _Pass(self, name, region, first_run=not recomputing)

    @property
    def gradient_scaler(self) -> None:
        return None

    # Figures

    def metrics(self) -> dict[str, float]:
        return {}

    def record_health(self, enabled: bool) -> None:
        self._health = HealthRecorder() if enabled else None

    def health(self) -> dict[str, float]:
        figures = {} if self._health is None else self._health.figures()
        if figures and self._forward_histories and self._backward_histories:
            forward = self._forward_histories.infinities()
            backward = self._backward_histories.infinities()
            for name, (first, first_backward) in self._slots.items():
                counts = {t: forward[first + c] for t, c in _FORWARD_COLUMNS.items()}
                counts |= {t: backward[first_backward + c] for t, c in _BACKWARD_COLUMNS.items()}
                for tensor, count in counts.items():
                    if count:
                        figures[f"fp8/{name}/{tensor}/infinities"] = float(count)
        return figures

    def health_later(self) -> Callable[[], dict[str, float]]:
        figures = self.health()  # each cast was counted, and waited for, when it was made
        return lambda: figures

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """``<module>.<forward|backward>.<amax_history|scale|updates>``; empty if current scaling.

        ``amax_history``: fp32 ``[amax_history_len, 3]`` forward (input, weight, output) and
        ``[amax_history_len, 2]`` backward (grad_output, grad_input); ``scale`` fp32 and
        ``updates`` int64, one an amax column.
        """
        state: dict[str, Tensor] = {}
        for name, direction, histories, first, width in self._groups():
            values = histories.read(first, width)
            state[f"{name}.{direction}.amax_history"] = values.amax_history
            state[f"{name}.{direction}.scale"] = values.scale
            state[f"{name}.{direction}.updates"] = values.updates
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.state_dict())
        for name, direction, histories, first, _ in self._groups():
            prefix = f"{name}.{direction}"
            histories.write(
                first,
                AmaxHistory(
                    state[f"{prefix}.amax_history"],
                    state[f"{prefix}.scale"],
                    state[f"{prefix}.updates"],
                ),
            )
        self._repeatable = None
        self._backward_due = self._ambiguous = False

    def _groups(self) -> Iterator[tuple[str, str, AmaxHistories, int, int]]:
        for name, (forward, backward) in self._slots.items():
            if self._forward_histories is not None and self._backward_histories is not None:
                yield name, "forward", self._forward_histories, forward, _FORWARD_WIDTH
                yield name, "backward", self._backward_histories, backward, _BACKWARD_WIDTH

    def _forward_scales(self) -> Scales | None:
        return None if self._forward_histories is None else self._forward_histories.scales

    @contextmanager
    def _enter(self, region: _Region) -> Iterator[None]:
        if self._region is not None:
            raise RuntimeError("the engine's contexts do not nest: leave the open one first")
        self._region = region
        if torch.is_grad_enabled():
            if self._backward_due and region != self._repeatable:
                self._ambiguous = True
            self._repeatable, self._backward_due = region, True
        try:
            with self._autocast():
                yield
        finally:
            self._region = None

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _quantize(
        self, tensor: Tensor, name: str, role: str, region: _Region, record: bool
    ) -> QuantizedTensor:
        if isinstance(tensor, Float8Weight):
            if record and self._health is not None:
                self._health.take(f"{name}/{role}", tensor.cast.figures)
            return QuantizedTensor(tensor.codes, tensor.scale_inverse, tensor.cast.may_hold_nan)
        forward = role in _FORWARD_COLUMNS
        fmt = E4M3 if forward else self._backward_format
        measured = measure_amax(tensor)
        if self._forward_histories is None or self._backward_histories is None:
            power_of_two = isinstance(self.recipe, EmulatedCurrent) and (
                self.recipe.use_power_2_scales
            )
            scale = current_scale(measured.value, fmt.max, power_of_two=power_of_two)
            inverse = scale.reciprocal()
        else:
            if forward:
                histories, column = self._forward_histories, _FORWARD_COLUMNS[role]
                scales = histories.scales if region.scales is None else region.scales
                column += self._slots[name][0]
            else:
                histories, column = self._backward_histories, _BACKWARD_COLUMNS[role]
                scales = histories.scales
                column += self._slots[name][1]
            scale, inverse = scales.scale[column], scales.inverse[column]
            if record:
                histories.record(column, measured.value)
        codes = quantize(tensor, scale, fmt)
        if record and self._health is not None:
            self._health.record(f"{name}/{role}", tensor, measured.value, scale, codes, fmt)
        return QuantizedTensor(codes, inverse, measured.may_hold_nan)


class _Pass:
    """One forward pass of one Linear in FP8, and its backward pass.

    ``first_run`` is False for a recomputation, whose forward amaxes have been staged before. Its
    backward pass counts all the same: it is the only one (re-entrant checkpointing), or there is
    none (the other kind).
    """

    def __init__(
        self, engine: EmulatedEngine, name: str, region: _Region, *, first_run: bool
    ) -> None:
        self.override = engine.recipe.override_linear_precision
        self._engine = engine
        self._name = name
        self._region = region
        self._first_run = first_run

    def quantize(self, tensor: Tensor, role: str) -> QuantizedTensor:
        record = self._region.training and (self._first_run or role == "grad_output")
        return self._engine._quantize(tensor, self._name, role, self._region, record)


def linear_refusal(linear: nn.Linear) -> str | None:
    """Why an FP8 engine leaves ``linear`` alone, or None."""
    kind = type(linear)
    if kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} computes more than a Linear does"
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "its attention module reads the weight itself and never calls it"
    if not isinstance(linear._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from other parameters"
    if linear.weight.dtype not in _DTYPES:
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    for label in ("in_features", "out_features"):
        size = getattr(linear, label)
        if size % DIMENSION_MULTIPLE:
            return f"{label} {size} is not a multiple of {DIMENSION_MULTIPLE}"
    return None


def _scaling(recipe: EmulatedDelayed, fmt: Float8Format) -> DelayedScaling:
    return DelayedScaling(
        fp8_max=fmt.max,
        margin=recipe.margin,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        interval=recipe.interval,
    )


def _inside_backward() -> bool:
    # What torch.utils.checkpoint itself asks to tell a recomputation from other forward passes.
    return torch._C._current_graph_task_id() != -1
