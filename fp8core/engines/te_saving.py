"""Of a weight's two FP8 copies, only the one that the backward pass reads is kept for it.

On Hopper FP8 GEMMs take their operands in one order of the two, so that Transformer Engine casts a
weight row-wise for the forward pass and column-wise for dgrad. It keeps both until the backward
pass has come: a byte a weight for nothing, 6.5 GiB of a model of 8B.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp8core.engines.te_stored import stored_for_gemms
from fp8core.numerics.float8_weight import Float8Weight

__all__ = ["keep_columns_only"]


def keep_columns_only(quantizers: list[Any]) -> list[Any]:
    """The quantizers of a module's weights (None without FP8), whose casts from now on are saved
    without their rows where they have columns. A weight that lies in FP8 is not cast.

    Casts that are kept for the next micro-batch are not touched, nor formats scaled by blocks.
    """
    for quantizer in quantizers:
        if quantizer is not None and "quantize_impl" not in quantizer.__dict__:
            quantizer.quantize_impl = _casting(weakref.ref(quantizer))
    return quantizers


def _casting(reference: weakref.ref[Any]) -> Callable[[Tensor], Any]:
    def cast(tensor: Tensor) -> Any:
        if isinstance(tensor, Float8Weight):
            return stored_for_gemms(tensor)
        quantizer: Any = reference()
        if _backward_reads_no_fp8():
            quantizer.set_usage(columnwise=False)
        made = type(quantizer).quantize_impl(quantizer, tensor)
        # Only what is no torch.Tensor, which Transformer Engine would keep for later, and only
        # of formats with one scale: others have their columns' scales beside them.
        if type(made).__name__ == "Float8TensorStorage" and _has_columns(made):
            made.prepare_for_saving = _saving(weakref.ref(made))
        return made

    return cast


def _backward_reads_no_fp8() -> bool:
    """Under ``backward_override`` Transformer Engine casts columns in the first run of a block that
    is recomputed, and none in the recomputation. Nothing reads them, and ``torch.utils.checkpoint``
    takes the one tensor less for a fault of its own ("list index out of range")."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe = FP8GlobalStateManager.get_fp8_recipe()
    return getattr(recipe, "backward_override", None) is not None


def _has_columns(made: Any) -> bool:
    return made._transpose is not None and not made._transpose_invalid


def _saving(reference: weakref.ref[Any]) -> Callable[[], tuple[list[Tensor | None], Any]]:
    """In the place of ``prepare_for_saving``, which is called when the GEMM has been enqueued."""

    def save() -> tuple[list[Tensor | None], Any]:
        made: Any = reference()
        made._data = None
        saved: tuple[list[Tensor | None], Any] = type(made).prepare_for_saving(made)
        return saved

    return save
