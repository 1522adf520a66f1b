"""What a precision engine is: the one protocol between the training loop, conversion and precision.

An engine owns how a GEMM is computed. Conversion asks it which modules it can take and lets it
build their replacements; the loop wraps each micro-batch in its contexts and tells it when a
backward pass has ended. Nothing else of the library knows which engine is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Availability:
    """Whether an engine can run here, and if not, every reason why, for a person to act on."""

    ok: bool
    reasons: tuple[str, ...] = ()
    version: str | None = None


@dataclass(frozen=True)
class NormDescription:
    """A normalisation layer by what it computes, whatever its class is called.

    ``layer_norm``: ``(x - mean) / sqrt(var + eps) * weight + bias``; ``rms_norm``:
    ``x / sqrt(mean(x^2) + eps) * weight + bias``, both over the trailing ``normalized_shape``.
    With ``zero_centered`` the factor is ``1 + weight``. ``weight`` and ``bias`` are the module's
    own Parameters, or None where it has none.
    """

    kind: Literal["layer_norm", "rms_norm"]
    normalized_shape: tuple[int, ...]
    eps: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    zero_centered: bool = False


class AmaxSharing(Protocol):
    """The ranks that train one model, as an engine with delayed scaling needs them.

    Every rank calls it at the same places, in the same order.
    """

    @property
    def process_group(self) -> Any:
        """Their ``torch.distributed`` group, for an engine that exchanges by itself."""
        ...

    def maximum(self, tensor: Tensor) -> None:
        """Puts the largest of the ranks' values in place of each element."""
        ...


@runtime_checkable
class Engine(Protocol):
    """One precision engine, bound to a recipe and a device, for one model in one process.

    A model is converted, then ``prepare``d once. A training step is, for every micro-batch::

        with engine.training_context():
            loss = ...                     # forward
        loss.backward()                    # gradient_scaler.scale(loss) where there is a scaler
        engine.after_backward()

    followed by the optimizer's step (through ``gradient_scaler`` where there is one).
    """

    name: str
    recipe: Any
    device: torch.device
    token_multiple: int
    """The number of tokens of every micro-batch, evaluation too, is a multiple of this."""
    compute_dtype: torch.dtype
    """Dtype in which activations leave the layers (the autocast dtype; fp32 without autocast)."""

    def linear_refusal(self, linear: nn.Linear) -> str | None:
        """Why this Linear stays as it is, or None where ``convert_linear`` will take it."""
        ...

    def norm_refusal(self, norm: NormDescription) -> str | None:
        """Why this norm stays as it is, or None where ``convert_norm`` will take it."""
        ...

    def convert_linear(self, linear: nn.Linear, name: str) -> nn.Module:
        """A replacement that computes ``linear`` in this engine's precision.

        It holds the SAME Parameter objects (ties and ``requires_grad`` survive), under the same
        names, and no further persistent state. ``name`` is the module's path in the model; it
        keys the FP8 state and the health metrics and is unique within the engine.
        """
        ...

    def convert_norm(self, norm: NormDescription, name: str) -> nn.Module:
        """A replacement for a norm, with the same Parameter objects as ``weight`` and ``bias``."""
        ...

    def share_amaxes(self, ranks: AmaxSharing) -> None:
        """Called once, before the first step, where several ranks train the model together.

        From then on every update of a scale is made from the largest amax of all ranks, so that
        histories and scales stay the same on all of them. Without effect where scales are made
        from the very tensor that is cast: each rank's fit its own share of the batch.
        """
        ...

    def prepare(self, model: nn.Module) -> None:
        """Called once when the model is converted and before its first step, to compile it.

        The module tree, the state dict's keys and the Parameters stay as they are.
        """
        ...

    def checkpoint_function(self) -> Callable[..., Any] | None:
        """What recomputes a block under gradient checkpointing: ``function(block, *inputs)``.

        None: ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` will do. The first run
        of a block must lie in a training context.
        """
        ...

    def training_context(
        self, first_microbatch: bool | None = None
    ) -> AbstractContextManager[None]:
        """Wraps the forward pass (and loss) of one micro-batch. Not re-entrant.

        ``first_microbatch``: under gradient accumulation, True for the first micro-batch of an
        optimizer step and False for the others, which see the same weights; an engine may then
        use its casts of the weights again. None: the weights may differ from those before.
        """
        ...

    def evaluation_context(self) -> AbstractContextManager[None]:
        """Wraps a forward pass that is not trained on; leaves every FP8 state untouched."""
        ...

    def after_backward(self) -> None:
        """Called once after the backward pass of each micro-batch."""
        ...

    @property
    def gradient_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler (fp16 only), to be driven by the loop; None for all other recipes."""
        ...

    def metrics(self) -> dict[str, float]:
        """Cheap numbers about the engine itself, such as ``amp/loss_scale``; may be empty."""
        ...

    def record_health(self, enabled: bool) -> None:
        """Gather FP8 health from now on (True) or stop and forget (False, the default).

        Switch it on before a step's forward pass, read ``health()`` after ``after_backward()``,
        and switch it off again: while it is off, health costs nothing.
        """
        ...

    def health(self) -> dict[str, float]:
        """What was gathered since ``record_health(True)``; empty where recording is off.

        Keys: ``fp8/<module>/<tensor>/<figure>`` with tensor ``input``, ``weight`` or
        ``grad_output`` and figure ``amax``, ``scale`` (the factor applied before the cast),
        ``saturated`` and ``underflow`` (fractions of elements, 0 to 1); with delayed scaling also
        ``infinities``, how many amaxes of the tensor's history are infinite, where there are any.
        """
        ...

    def health_later(self) -> Callable[[], dict[str, float]]:
        """``health()`` in two parts: the call waits for nothing, the call of its result does.

        What it gives is the health as of the first call, whatever is recorded meanwhile.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The engine's own state (FP8 histories and scales, the loss scale) as plain tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes a ``state_dict`` back bit for bit.

        Raises ValueError, before anything is changed, where names, shapes or dtypes differ from
        this engine's own; the message lists the differences.
        """
        ...


@runtime_checkable
class StoringEngine(Protocol):
    """An engine whose layers can read a frozen weight that lies in FP8, a `Float8Weight`.

    They take its codes and its scale as they are, with any recipe whose weights have one scale.
    In high precision they read the values that these stand for.
    """

    stores_powers_of_two: bool
    """Whether the scale of such a weight is to be a power of two."""

    def reads_stored_weights(self, module: nn.Module) -> bool:
        """Whether ``module``, which this engine made, does under its recipe."""
        ...


@runtime_checkable
class GraphedEngine(Protocol):
    """An engine whose forward and backward pass may be captured in a CUDA graph and replayed.

    With which recipes, `fp8core.spec.step_graphs` says.
    """

    @property
    def records_health(self) -> bool:
        """Whether a pass with `record_health` on is another than one without."""
        ...

    def captured_health(self) -> Any:
        """With `record_health` on, behind the capture of a pass: what `replayed` is to be given
        when that pass is replayed."""
        ...

    def replayed(self, health: Any = None) -> None:
        """Called at each replay: does what the engine does on the host in such a pass.

        ``health``: of a pass that was captured with `record_health` on; its figures are read as
        those of any recorded pass.
        """
        ...
