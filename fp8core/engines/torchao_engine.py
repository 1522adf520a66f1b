"""The torchao engine: float8 training with scales made from the very tensor that is cast.

The layers are torchao's ``Float8Linear`` over the model's own Parameters. FP8 all-gather stays off:
it would put a tensor subclass in the place of each weight, which no optimizer made for the model
knows. On a GPU the blocks of the model are compiled, without which torchao is slower than bf16; on
a CPU the FP8 GEMMs are emulated, eagerly. There is no state to save: every scale is made anew.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.engines.blocks import find_blocks
from fp8core.engines.emulated import linear_refusal
from fp8core.engines.protocol import (
    AmaxSharing,
    Availability,
    NormDescription,
)
from fp8core.engines.state_check import check_state
from fp8core.engines.torchao_health import HealthReader, LayerHealth
from fp8core.errors import EngineUnsupported
from fp8core.spec.recipe import TOKEN_MULTIPLE, TorchaoRecipe

__all__ = ["TorchaoEngine", "availability"]

# torch._scaled_mm with one scale a tensor, and with one a row.
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}


def availability(recipe: TorchaoRecipe, device: torch.device) -> Availability:
    """Whether torchao is here and can run ``recipe`` on ``device``."""
    if importlib.util.find_spec("torchao") is None:
        return Availability(False, ("torchao is not installed: pip install 'octrain[torchao]'",))
    version = importlib.metadata.version("torchao")
    try:
        _torchao()
    except Exception as error:
        return Availability(False, (f"torchao does not import: {error}",), version)
    if device.type == "cpu":
        return Availability(True, (), version)
    if device.type != "cuda" or not torch.cuda.is_available():
        return Availability(False, ("no CUDA device is usable here",), version)
    needed, found = _CAPABILITY[recipe.scaling], torch.cuda.get_device_capability(device)
    if found < needed:
        reason = (
            f"torchao {recipe.scaling} needs a GPU of compute capability {_dotted(needed)} or "
            f"later; this one has {_dotted(found)}"
        )
        return Availability(False, (reason,), version)
    return Availability(True, (), version)


class TorchaoEngine:
    """One torchao recipe on one device for one model. ``compile_backend``: see `prepare`."""

    name = "torchao"
    token_multiple = TOKEN_MULTIPLE
    compute_dtype = torch.bfloat16
    gradient_scaler = None

    def __init__(
        self, recipe: TorchaoRecipe, device: torch.device, compile_backend: str | None = None
    ) -> None:
        found = availability(recipe, device)
        if not found.ok:
            raise EngineUnsupported("; ".join(found.reasons), pointer="/recipe")
        self.recipe = recipe
        self.device = device
        self._backend = compile_backend or ("inductor" if device.type == "cuda" else None)
        self._config = _config(recipe, emulate=device.type == "cpu")
        self._region = Region()
        self._linears: dict[str, Any] = {}
        self._reader: HealthReader | None = None

    # Conversion

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        return linear_refusal(linear)

    def norm_refusal(self, norm: NormDescription) -> str | None:
        return "torchao has no norms; torch.compile fuses the model's own"

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        if name in self._linears:
            raise ValueError(f"this engine already has a module named {name!r}")
        layer: nn.Module = _linear_class().from_float(linear, config=self._config)
        layer.train(linear.training)
        layer.__dict__["region"] = self._region
        layer.__dict__["health"] = LayerHealth(linear.weight.device)
        self._linears[name] = layer
        return layer

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        raise TypeError(self.norm_refusal(norm))

    def share_amaxes(self, ranks: AmaxSharing) -> None:
        """Nothing to do: every scale is made from the tensor that is cast."""

    def prepare(self, model: nn.Module) -> None:
        """Compiles each block that holds converted layers, and such layers outside of any block.

        With torch.compile's backend ``inductor`` on a GPU; not at all on a CPU.
        """
        if self._backend is None:
            return
        options: dict[str, Any] = {"backend": self._backend}
        if self._backend == "inductor" and self.recipe.scaling != "tensorwise":
            # Fused norms that keep more bits than bf16 before a rowwise cast gave NaN
            # (pytorch issue 150859).
            options["options"] = {"emulate_precision_casts": True}
        for module in find_blocks(model, set(map(id, self._linears.values()))):
            module.compile(**options)

    def checkpoint_function(self) -> Callable[..., Any] | None:
        return None

    # The step

    @contextmanager
    def training_context(self, first_microbatch: bool | None = None) -> Iterator[None]:
        with self._opened():
            self._region.fp8 = True
            yield
        # FP8 stays on for the recomputations of the backward pass.
        self._region.fp8 = torch.is_grad_enabled()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        before = self._region.fp8
        with self._opened():
            self._region.fp8 = False
            try:
                yield
            finally:
                self._region.fp8 = before

    @contextmanager
    def _opened(self) -> Iterator[None]:
        if self._region.open:
            raise RuntimeError("the engine's contexts do not nest: leave the open one first")
        self._region.open = True
        try:
            with torch.autocast(self.device.type, dtype=self.compute_dtype):
                yield
        finally:
            self._region.open = False

    def after_backward(self) -> None:
        self._region.fp8 = False

    # Figures and state

    def metrics(self) -> dict[str, float]:
        return {}

    def record_health(self, enabled: bool) -> None:
        self._region.recording = enabled
        LayerHealth.clear(layer.health for layer in self._linears.values())

    def health(self) -> dict[str, float]:
        """For a layer used once in a pass; of rows scaled one by one, the scale is the smallest."""
        return self.health_later()()

    def health_later(self) -> Callable[[], dict[str, float]]:
        if not self._region.recording:
            return dict
        if self._reader is None or self._reader.layers != list(self._linears):
            self._reader = HealthReader(self._linears, self._config)
        return self._reader.read_later()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, {})


class Region:
    """What the layers of one engine are told, by attributes that compiled code can guard.

    ``fp8``: from the beginning of a training context to the end of its backward pass.
    """

    def __init__(self) -> None:
        self.open = False
        self.fp8 = False
        self.recording = False


@functools.cache
def _torchao() -> Any:
    """The module ``torchao.float8``, imported without its complaints about optional kernels."""
    levels = {name: logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.float8

            return torchao.float8
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _config(recipe: TorchaoRecipe, *, emulate: bool) -> Any:
    """torchao's config of the named recipe, emulated where there is no FP8 hardware."""
    named = _torchao().Float8LinearConfig.from_recipe_name(recipe.scaling)
    return dataclasses.replace(named, emulate=emulate)


@functools.cache
def _linear_class() -> Any:
    _torchao()
    from torchao.float8.float8_linear import Float8Linear

    class OctrainFloat8Linear(Float8Linear):
        """torchao's Linear, which is an ordinary one outside training."""

        def forward(self, input: Tensor) -> Tensor:
            region: Region = self.region
            if not region.fp8:
                return nn.functional.linear(input, self.weight, self.bias)
            # torchao looks at a GPU's autocast alone.
            if torch.is_autocast_enabled(input.device.type):
                input = input.to(torch.get_autocast_dtype(input.device.type))
            output: Tensor = super().forward(input)
            if region.recording:
                output = self.health.watch(input, output, self.config)
            return output

    return OctrainFloat8Linear


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
