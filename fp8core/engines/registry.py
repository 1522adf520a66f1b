"""The engines there are: whether each can run here, and how to make one from a recipe."""

from __future__ import annotations

import torch

from fp8core.engines import te_availability, torchao_engine, transformer_engine
from fp8core.engines.amp import AmpEngine
from fp8core.engines.emulated import EmulatedEngine
from fp8core.engines.protocol import Availability, Engine
from fp8core.errors import EngineUnsupported
from fp8core.spec.recipe import (
    AmpRecipe,
    EmulatedCurrent,
    EmulatedDelayed,
    Recipe,
    TEDelayed,
    TorchaoRecipe,
)

__all__ = ["all_availability", "availability", "create"]


def availability(recipe: Recipe, device: torch.device | str) -> Availability:
    """Whether ``recipe`` can run on ``device`` in this process, and every reason why not."""
    device = torch.device(device)
    if recipe.engine == "te":
        return te_availability.availability(recipe, device)
    if isinstance(recipe, TorchaoRecipe):
        return torchao_engine.availability(recipe, device)
    reasons: list[str] = []
    if device.type == "cuda" and not torch.cuda.is_available():
        reasons.append("no CUDA device is usable here")
    elif (
        device.type == "cuda"
        and isinstance(recipe, AmpRecipe)
        and recipe.dtype == "bf16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        reasons.append("this GPU has no bf16 arithmetic; use dtype 'fp16'")
    return Availability(not reasons, tuple(reasons), torch.__version__)


def create(recipe: Recipe, device: torch.device | str) -> Engine:
    """The engine for ``recipe`` on ``device``, for one model.

    Raises EngineUnsupported, with the reasons of ``availability``, where there is none.
    """
    device = torch.device(device)
    available = availability(recipe, device)
    if not available.ok:
        raise EngineUnsupported("; ".join(available.reasons), pointer="/recipe")
    if isinstance(recipe, EmulatedDelayed | EmulatedCurrent):
        return EmulatedEngine(recipe, device)
    if isinstance(recipe, AmpRecipe):
        return AmpEngine(recipe, device)
    if isinstance(recipe, TorchaoRecipe):
        return torchao_engine.TorchaoEngine(recipe, device)
    if recipe.engine == "te":
        return transformer_engine.TransformerEngine(recipe, device)
    raise EngineUnsupported(f"no engine runs {type(recipe).__name__}", pointer="/recipe")


def all_availability(device: torch.device | str) -> dict[str, Availability]:
    """``availability`` of every engine, each with its default recipe, by the engine's name."""
    defaults: tuple[Recipe, ...] = (
        TEDelayed(),
        TorchaoRecipe(engine="torchao"),
        EmulatedDelayed(engine="emulated"),
        AmpRecipe(engine="amp"),
    )
    return {recipe.engine: availability(recipe, device) for recipe in defaults}
