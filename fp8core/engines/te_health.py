"""FP8 health on a GPU: what each layer's tensors lose to the cast, read with hooks when asked.

`cast_figures` says what is counted. The hooks only enqueue one small kernel for each tensor, so
that a recorded step costs little more than reading its tensors once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.cast_figures import CastFigures, CastRule, ScaleFrom
from fp8core.engines.te_override import OperandUse
from fp8core.engines.te_state import gemms_of
from fp8core.numerics.float8_weight import Float8Weight

__all__ = ["HealthRecorder", "Recorded", "Rules", "cast_rules"]

Scales = Callable[[], Mapping[tuple[str, str], Tensor]]
"""The scales of the next casts by (layer, tensor), 0-dim fp32; none where made at the cast."""

Reading = Callable[[], dict[str, float]]
"""Waits for figures, ``fp8/<layer>/<tensor>/<figure>``."""

Rules = Mapping[str, CastRule]
"""How those of input, weight and grad_output are cast that are cast at all."""


def cast_rules(recipe: Any) -> Rules:
    """The rules of a te recipe, for those tensors that some GEMM reads in FP8. Empty for scalings
    with blocks of 32 or 16: they need a GPU on which nobody has compared these figures yet."""
    hybrid = getattr(recipe, "fp8_format", "E4M3") == "HYBRID"
    formats = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2" if hybrid else "e4m3"}
    power_of_two = False
    if recipe.scaling == "delayed":
        sources = dict.fromkeys(formats, ScaleFrom.GIVEN)
    elif recipe.scaling == "current":
        sources = dict.fromkeys(formats, ScaleFrom.TENSOR)
        power_of_two = recipe.use_power_2_scales
    elif recipe.scaling == "block":
        dimensions = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        blocks = {1: ScaleFrom.ROW_BLOCKS, 2: ScaleFrom.TILES}
        sources = {tensor: blocks[dimension] for tensor, dimension in dimensions.items()}
        power_of_two = not recipe.use_f32_scales
    else:
        return {}
    use = OperandUse.of(tuple(getattr(recipe, "override_linear_precision", (False,) * 3)))
    cast = {"input": use.input, "weight": use.weight, "grad_output": use.grad_output}
    if getattr(recipe, "backward_override", None) is not None:
        cast["grad_output"] = False
    return {
        tensor: CastRule.of(formats[tensor], source, power_of_two=power_of_two)
        for tensor, source in sources.items()
        if cast[tensor]
    }


@dataclass(frozen=True)
class Recorded:
    """What the host knows of a recorded pass, where a CUDA graph of it is replayed."""

    elements: list[int]
    scales: dict[tuple[str, str], Tensor]
    """In the graph's memory, which is theirs as long as this is held."""


class HealthRecorder:
    """Gathers the figures of input, weight and grad_output of each GEMM while recording is on.

    Modules are te.Linear and its like, or fused ones (`gemms_of`). Of a fused module the first
    GEMM's input is the normalised one, computed again for this; what lies between its GEMMs exists
    in kernels only, so that of those tensors there are amax and scale alone, from the history.
    """

    def __init__(self, scales: Scales, rules: Rules, device: torch.device) -> None:
        self._read_scales = scales
        self._rules = rules
        self._device = device
        self._handles: list[Any] = []
        self._figures: CastFigures | None = None
        self._names: list[str] = []
        self._scales: dict[tuple[str, str], Tensor] = {}
        # Figures of weights that were cast once, by name; they stay what they are.
        self._stored: dict[str, dict[str, float]] = {}
        self._on = False

    def record(
        self,
        enabled: bool,
        modules: Mapping[str, nn.Module],
        hidden: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Begin anew with these modules, or end; what was gathered is forgotten.

        ``hidden``: (layer, tensor) of what no module is given, of which histories alone tell.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._scales.clear()
        self._on = enabled and bool(self._rules) and bool(modules)
        if not self._on:
            return
        gemms = [name + gemm for name, module in modules.items() for gemm in gemms_of(module)]
        names = [f"fp8/{gemm}/{tensor}" for gemm in gemms for tensor in self._rules]
        names += [f"fp8/{layer}/{tensor}" for layer, tensor in hidden]
        if self._figures is None or self._names != names:
            self._names = names
            self._figures = CastFigures(names, self._device)
        self._figures.clear()
        for name, module in modules.items():
            fused = "_gemms" in module.__dict__
            own = [name + gemm for gemm in gemms_of(module)]
            watch = self._watch_fused(own) if fused else self._watch_linear(name)
            self._handles.append(module.register_forward_hook(watch))

    @property
    def has_rules(self) -> bool:
        return bool(self._rules)

    def recorded(self) -> Recorded:
        """Of the pass that was just captured."""
        assert self._figures is not None
        return Recorded(self._figures.counted(), dict(self._scales))

    def replayed(self, recorded: Recorded) -> None:
        """The pass goes on the device once more; its figures can be read as those of any pass."""
        assert self._figures is not None
        self._on = True
        self._figures.count_as(recorded.elements)
        self._scales = dict(recorded.scales)

    def before_forward(self) -> None:
        """Keep the scales this micro-batch casts with; the update after it replaces them."""
        scales = self._read_scales() if self._on else {}
        if scales:
            # One copy of all of them: a kernel for each would cost more than the figures.
            kept = torch.stack(list(scales.values())).float().unbind()
            self._scales = dict(zip(scales, kept, strict=True))

    def read_later(self, hidden: Mapping[tuple[str, str], Tensor]) -> Reading | None:
        """A function that waits for what has been gathered; None while recording is off.

        ``hidden``: the amaxes (0-dim) of the recorded pass by (layer, tensor), for those tensors
        that no hook sees.
        """
        if not self._on or self._figures is None:
            return None
        names = {key: f"fp8/{key[0]}/{key[1]}" for key in hidden if key in self._scales}
        known = [key for key, name in names.items() if name in self._names]
        if known:
            self._figures.set_uncounted(
                [names[key] for key in known],
                torch.stack([hidden[key] for key in known]).float(),
                torch.stack([self._scales[key] for key in known]),
            )
        read, told = self._figures.read_later(), frozenset(self._names)
        stored = {
            f"{name}/{figure}": value
            for name, figures in self._stored.items()
            for figure, value in figures.items()
            if name in told
        }
        return lambda: read() | stored

    def _watch_linear(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if torch.is_grad_enabled():
                self._note(name, "input", inputs[0])
                self._note(name, "weight", module.weight)  # type: ignore[arg-type]  # a Tensor
                self._watch_gradient(name, output)

        return hook

    def _watch_fused(self, gemms: Sequence[str]) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._note(gemms[0], "input", _normalised(module, inputs[0]))
                    for gemm, weight in zip(gemms, module._get_weight_tensors(), strict=True):
                        self._note(gemm, "weight", weight)
                # Beside it may be what its norm made of the input.
                self._watch_gradient(gemms[-1], output[0] if isinstance(output, tuple) else output)

        return hook

    def _watch_gradient(self, name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._note(name, "grad_output", gradient))

    def _note(self, name: str, tensor: str, value: Tensor) -> None:
        rule = self._rules.get(tensor)
        if isinstance(value, Float8Weight):
            self._stored[f"fp8/{name}/{tensor}"] = value.cast.figures
            return
        if not self._on or self._figures is None or rule is None:
            return
        scale = self._scales.get((name, tensor))
        if scale is None and rule.scale_from is ScaleFrom.GIVEN:
            # A layer of Transformer Engine has no state before its first pass: it begins at 1.
            scale = torch.ones((), dtype=torch.float32, device=value.device)
        self._figures.add(f"fp8/{name}/{tensor}", value, rule, scale)


def _normalised(module: Any, x: Tensor) -> Tensor:
    """What the norm of a fused module, if it has one, makes of ``x`` (which it casts unrounded)."""
    if not hasattr(module, "layer_norm_weight"):
        return x
    weight = module.layer_norm_weight.to(x.dtype)
    if module.zero_centered_gamma:
        weight = weight + 1
    if module.normalization == "RMSNorm":
        return nn.functional.rms_norm(x, (x.shape[-1],), weight, module.eps)
    bias = module.layer_norm_bias.to(x.dtype)
    return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, module.eps)
