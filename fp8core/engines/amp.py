"""The amp engine: the baselines without FP8, through PyTorch's own mixed precision.

``bf16`` and ``fp16`` are autocast over the model as it is, ``fp32`` is the model as it is. Nothing
is converted; in bf16 on a GPU blocks may be fused, in the same precision. fp16 scales the
loss, and steps whose gradients overflow are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core.engines.protocol import AmaxSharing, NormDescription
from fp8core.engines.state_check import check_state
from fp8core.spec.recipe import TOKEN_MULTIPLE, AmpRecipe

if TYPE_CHECKING:
    from fp8core.fusion.parts import BlockParts

__all__ = ["AmpEngine"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_REFUSAL = "engine amp converts nothing"


class AmpEngine:
    """PyTorch autocast in bf16 or fp16, or plain fp32."""

    name = "amp"
    token_multiple = TOKEN_MULTIPLE
    fuses_what_it_keeps = True

    def __init__(self, recipe: AmpRecipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.compute_dtype = _DTYPES[recipe.dtype]
        self._scaler: _CountingGradScaler | None = None
        if recipe.dtype == "fp16":
            self._scaler = _CountingGradScaler(
                device.type,
                init_scale=recipe.initial_loss_scale,
                growth_interval=recipe.growth_interval,
            )

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        return _REFUSAL

    def norm_refusal(self, norm: NormDescription) -> str | None:
        return _REFUSAL

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        raise TypeError(_REFUSAL)

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        raise TypeError(_REFUSAL)

    def fusion_refusal(self) -> str | None:
        """Why no block is fused on this device in this dtype, or None."""
        from fp8core.fusion.high_precision import refusal

        return refusal(self.device, self.compute_dtype)

    def block_parts(self) -> BlockParts:
        from fp8core.fusion.high_precision import HighPrecisionParts

        return HighPrecisionParts(self.compute_dtype)

    @property
    def records_health(self) -> bool:
        return False

    def captured_health(self) -> Any:
        """Nothing is recorded."""

    def replayed(self, health: Any = None) -> None:
        """Nothing is counted."""

    def share_amaxes(self, ranks: AmaxSharing) -> None:
        """Nothing to do: there are no amaxes."""

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do: the baselines run eagerly."""

    def checkpoint_function(self) -> Callable[..., Any] | None:
        return None

    def training_context(self, first_microbatch: bool | None = None) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        return self.training_context()

    def after_backward(self) -> None:
        """Nothing to do: there is no FP8 state."""

    @property
    def gradient_scaler(self) -> torch.amp.GradScaler | None:
        return self._scaler

    def metrics(self) -> dict[str, float]:
        """fp16: ``amp/loss_scale`` and ``amp/skipped_steps`` (since the run began)."""
        if self._scaler is None:
            return {}
        return {
            "amp/loss_scale": self._scaler.get_scale(),
            "amp/skipped_steps": float(self._scaler.skipped_steps),
        }

    def record_health(self, enabled: bool) -> None:
        """Nothing to do: nothing is cast to FP8."""

    def health(self) -> dict[str, float]:
        return {}

    def health_later(self) -> Callable[[], dict[str, float]]:
        return dict

    def state_dict(self) -> dict[str, Tensor]:
        """fp16: loss scale (fp32), growth tracker and skipped steps (int64), all 0-dim."""
        if self._scaler is None:
            return {}
        scaler = self._scaler.state_dict()
        return {
            "amp.loss_scale": torch.tensor(scaler["scale"], dtype=torch.float32),
            "amp.growth_tracker": torch.tensor(scaler["_growth_tracker"], dtype=torch.int64),
            "amp.skipped_steps": torch.tensor(self._scaler.skipped_steps, dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.state_dict())
        if self._scaler is None:
            return
        scaler = self._scaler.state_dict()
        scaler["scale"] = float(state["amp.loss_scale"])
        scaler["_growth_tracker"] = int(state["amp.growth_tracker"])
        self._scaler.load_state_dict(scaler)
        self._scaler.skipped_steps = int(state["amp.skipped_steps"])


class _CountingGradScaler(torch.amp.GradScaler):
    """A gradient scaler that counts the optimizer steps it skipped for overflow."""

    def __init__(self, device: str, *, init_scale: float, growth_interval: int) -> None:
        super().__init__(device, init_scale=init_scale, growth_interval=growth_interval)
        self.skipped_steps = 0

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As the base class; a scale that shrank means that the step before was skipped."""
        before = self.get_scale()
        super().update(new_scale)
        if new_scale is None and self.get_scale() < before:
            self.skipped_steps += 1
