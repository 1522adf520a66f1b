"""The te engine: Transformer Engine's modules, kernels and recipes, every recipe field honoured.

What Transformer Engine dropped is given its meaning again here: ``interval`` (`te_state`) and
``override_linear_precision`` (`te_override`). The recipe is always explicit, layers carry their
name, and nothing is imported before an engine is asked for: the package may be absent or broken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import (
    AmaxSharing,
    NormDescription,
)
from fp8core.engines.te_attention_state import begin_attention
from fp8core.engines.te_availability import availability
from fp8core.engines.te_figures import Figures
from fp8core.engines.te_layers import ConvertedLayers
from fp8core.engines.te_modules import make_linear, make_norm
from fp8core.engines.te_override import (
    JoinedOverrideLinear,
    OverrideLinear,
    current_quantizer,
)
from fp8core.engines.te_recipe import feature_multiple, native_recipe
from fp8core.engines.te_recompute import FirstRun, Recomputation
from fp8core.engines.te_state import (
    ForwardScales,
    OwnDelayedState,
    ScaleInterval,
    forget_modules,
    scale_gradients,
)
from fp8core.engines.weight_casts import WeightCasts
from fp8core.errors import EngineUnsupported
from fp8core.spec.recipe import token_multiple

if TYPE_CHECKING:
    from fp8core.fusion.parts import BlockParts

HIGH_PRECISION = (True, True, True)
ALL_FP8 = (False, False, False)


class TransformerEngine:
    """One te recipe on one CUDA device for one model; the process must hold no other."""

    name = "te"
    compute_dtype = torch.bfloat16
    gradient_scaler = None
    fuses_what_it_keeps = False

    def __init__(self, recipe: Any, device: torch.device) -> None:
        found = availability(recipe, device)
        if not found.ok:
            raise EngineUnsupported("; ".join(found.reasons), pointer="/recipe")
        import transformer_engine.pytorch as te

        # State of a model converted earlier in this process would join this one's updates.
        forget_modules()
        self.recipe = recipe
        self.device = device
        self.token_multiple = token_multiple(recipe)
        self._te = te
        self._te_recipe = native_recipe(recipe)
        self._override = tuple(getattr(recipe, "override_linear_precision", ALL_FP8))
        self.fp8_attention = bool(getattr(recipe, "fp8_dpa", False))
        self.stores_powers_of_two = bool(getattr(recipe, "use_power_2_scales", False))
        self._enabled = False
        self._interval = ScaleInterval(getattr(recipe, "interval", 1))
        self._own: OwnDelayedState | None = None
        self._group: Any = None
        self._share: Callable[[Tensor], None] = lambda amaxes: None
        self._recomputation = Recomputation(self._first_run)
        self._casts = WeightCasts()
        self._backward = getattr(recipe, "backward_override", None)
        original = self._backward == "high_precision"
        self._weight_dtype = self.compute_dtype if original else None
        # A kept cast stages no amax. With an interval, the updates that are due could then miss
        # every cast of the weights, and their scales would never change again.
        self._keeps_casts = recipe.scaling != "delayed" or recipe.interval == 1
        if recipe.scaling == "delayed":
            import transformer_engine_torch as tex

            hybrid = recipe.fp8_format == "HYBRID"
            self._own = OwnDelayedState(
                recipe.amax_history_len,
                recipe.margin,
                recipe.amax_compute_algo,
                tex.DType.kFloat8E4M3,
                tex.DType.kFloat8E5M2 if hybrid else tex.DType.kFloat8E4M3,
                device,
            )
        self._layers = ConvertedLayers(self._own, overridden=self._override != ALL_FP8)
        self._figures = Figures(recipe, self._layers, self._casts, device)

    # Conversion

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        multiple = feature_multiple(self.recipe)
        for side in ("in_features", "out_features"):
            if getattr(linear, side) % multiple:
                return f"{side} {getattr(linear, side)} is not a multiple of {multiple}"
        if self._override == HIGH_PRECISION:
            return "override_linear_precision keeps all three GEMMs in high precision"
        return None

    def norm_refusal(self, norm: NormDescription) -> str | None:
        if norm.weight is None:
            return "Transformer Engine's norms always have a weight; this one has none"
        if norm.kind == "layer_norm" and norm.bias is None:
            return "te.LayerNorm always has a bias; this norm has none and must not gain one"
        if norm.kind == "rms_norm" and norm.bias is not None:
            return "te.RMSNorm has no bias; this norm has one"
        return None

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        if self._override != ALL_FP8:
            if self._own is not None:
                self._own.add(name)
            layer: nn.Module = OverrideLinear(
                linear.weight,  # type: ignore[arg-type]  # annotated Tensor by torch, a Parameter
                linear.bias,
                self._override,
                functools.partial(self._quantizer, name),
                self._is_enabled,
            )
        else:
            layer = make_linear(linear, name, self._casts, self._weight_dtype)
        self._layers.linears[name] = layer
        return layer

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        layer: nn.Module = make_norm(norm)
        return layer

    def reads_stored_weights(self, module: nn.Module) -> bool:
        """Formats with one scale a tensor, in Transformer Engine's own modules."""
        ours = "_weight_casts" in module.__dict__ and self._weight_dtype is None
        return ours and self.recipe.scaling in ("delayed", "current")

    def fusion_refusal(self) -> str | None:
        """Why no block is fused under this recipe, or None."""
        if self._override == HIGH_PRECISION:
            return "override_linear_precision keeps all three GEMMs in high precision"
        return None

    def block_parts(self) -> BlockParts:
        """What makes the parts of fused blocks; their FP8 state is this engine's from then on."""
        from fp8core.fusion.te_parts import FP8Attention, TEParts

        attention = FP8Attention(
            self._in_recipe, scale_gradients, self._layers.attentions.__setitem__, forget_modules
        )
        arguments = (
            self._layers.take_fused,
            self._layers.forget,
            self.convert_linear,
            self._casts,
            self.compute_dtype,
            attention if self.fp8_attention else None,
        )
        if self._override != ALL_FP8:
            from fp8core.fusion.te_overridden import OverriddenParts

            return OverriddenParts(self._joined_linear, self.compute_dtype, *arguments)
        if self._backward is not None:
            from fp8core.fusion.te_backward import BackwardParts

            return BackwardParts(self._weight_dtype, *arguments)
        return TEParts(*arguments)

    def _joined_linear(
        self, name: str, weights: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> nn.Module:
        if self._own is not None:
            self._own.add(name)
        layer = JoinedOverrideLinear(
            weights, self._override, functools.partial(self._quantizer, name), self._is_enabled
        )
        self._layers.linears[name] = layer
        return layer

    def _in_recipe(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._te.autocast(
            enabled=True, recipe=self._te_recipe, amax_reduction_group=self._group
        )
        return context

    @property
    def records_health(self) -> bool:
        return self._figures.recorder.has_rules

    def captured_health(self) -> Any:
        return self._figures.recorder.recorded()

    def replayed(self, health: Any = None) -> None:
        if health is not None:
            self._figures.recorder.replayed(health)
        if self._own is not None:
            for direction in ("forward", "backward"):
                self._interval.after_update(direction, {})

    def share_amaxes(self, ranks: AmaxSharing) -> None:
        # te.Linear's amaxes are reduced by Transformer Engine itself, over the group its context
        # is given: forward when the context is left, backward behind the region's first layer.
        self._group = ranks.process_group
        self._share = ranks.maximum

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do: Transformer Engine's modules run eagerly, in fused kernels."""

    def checkpoint_function(self) -> Callable[..., Any] | None:
        # torch's own recomputes outside Transformer Engine's context, and fails.
        return functools.partial(
            self._te.checkpoint, use_reentrant=False, context_fn=self._recomputation.contexts
        )

    # The step

    def training_context(
        self, first_microbatch: bool | None = None
    ) -> AbstractContextManager[None]:
        return self._context(fp8=True, training=True, first_microbatch=first_microbatch)

    def evaluation_context(self) -> AbstractContextManager[None]:
        fp8 = bool(getattr(self.recipe, "use_autocast_during_eval", False))
        return self._context(fp8=fp8, training=False)

    @contextmanager
    def _context(
        self, *, fp8: bool, training: bool, first_microbatch: bool | None = None
    ) -> Iterator[None]:
        before = self._enabled
        self._enabled = fp8
        self._recomputation.region_changes()
        if training:
            self._casts.begin(first_microbatch if self._keeps_casts else None)
            self._figures.recorder.before_forward()
        try:
            with (
                torch.autocast("cuda", dtype=self.compute_dtype),
                self._te.autocast(
                    enabled=fp8, recipe=self._te_recipe, amax_reduction_group=self._group
                ),
                nullcontext() if training else self._casts.paused(),
            ):
                if fp8:
                    begin_attention(self._layers.attentions)
                yield
        finally:
            self._enabled = before
            self._recomputation.region_changes()
        if training and fp8 and torch.is_grad_enabled():
            self._after_update("forward")
        elif fp8:
            # The cast left its amaxes in the staging row, where the next training step's maximum
            # would take them in; an evaluation must not move the scales.
            for _, state in self._layers.all_states("forward"):
                state.amax_history[0].zero_()

    def _is_enabled(self) -> bool:
        repeated = self._recomputation.repeated
        return self._enabled if repeated is None else repeated.fp8

    def _first_run(self) -> FirstRun:
        own = self._own.forward if self._own is not None else {}
        return FirstRun(self._enabled, ForwardScales(own) if own else None)

    def after_backward(self) -> None:
        self._after_update("backward")

    def _after_update(self, direction: str) -> None:
        if self._own is None:
            return
        self._own.update(forward=direction == "forward", share=self._share)
        each = self._interval.interval == 1
        self._interval.after_update(direction, {} if each else self._layers.scales(direction))

    def _quantizer(self, name: str, tensor: str) -> Any:
        if self._own is None:
            return current_quantizer(self.recipe, tensor, self.device)
        repeated = self._recomputation.repeated
        return self._own.quantizer(name, tensor, None if repeated is None else repeated.scales)

    # Figures and state

    def metrics(self) -> dict[str, float]:
        return {}

    def record_health(self, enabled: bool) -> None:
        self._figures.record(enabled)

    def health(self) -> dict[str, float]:
        return self.health_later()()

    def health_later(self) -> Callable[[], dict[str, float]]:
        return self._figures.read_later()

    def state_dict(self) -> dict[str, Tensor]:
        return self._layers.state_dict(self._interval, self._in_recipe)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._layers.load_state_dict(state, self._interval, self._in_recipe)
