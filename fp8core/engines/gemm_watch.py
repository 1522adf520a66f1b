"""Which formats the operands of a model's GEMMs really have, seen where the GEMMs are called.

Three places show an operand as it goes into the multiplication: PyTorch's dispatcher (plain GEMMs
and torchao's, whose operands are float8 tensors there), Transformer Engine's one entry to its GEMM
kernels, and the emulated engine, which multiplies decoded values and announces what it decoded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GEMMS", "GemmWatch", "announced", "format_of"]

GEMMS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
"""The operands of the three GEMMs of a linear layer."""

_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
# torch.ops.aten by name, and where the two matrices stand among the arguments.
_MATRICES = {"mm": 0, "addmm": 1, "_scaled_mm": 0}
_announcements: list[tuple[Any, Any]] = []


def format_of(value: Any) -> str:
    """The name of a tensor's format: a dtype's, or of what a quantized tensor holds.

    Transformer Engine's tensors say it in ``_fp8_dtype`` or ``_fp4_dtype``, torchao's in the dtype
    of ``_data``.
    """
    for attribute in ("_fp8_dtype", "_fp4_dtype"):
        held = getattr(value, attribute, None)
        if held is not None:
            # An enumeration's member; as text it may be a bare number.
            name = str(held.name).lower().removeprefix("kfloat")
            return f"fp{name[0]}_{name[1:]}" if name[:1].isdigit() else name
    data = getattr(value, "_data", None)
    dtype = data.dtype if isinstance(data, Tensor) else getattr(value, "dtype", value)
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


@contextmanager
def announced(left: Any, right: Any) -> Iterator[None]:
    """Inside, a GEMM counts as one of these two tensors, whatever stands in for them."""
    _announcements.append((left, right))
    try:
        yield
    finally:
        _announcements.pop()


class GemmWatch(TorchDispatchMode):
    """While entered, notes the operands of every GEMM of ``layers`` (linear layers by name).

    ``shape`` is that of the one micro-batch, [rows, tokens], by which wgrad is told from dgrad: no
    layer may have as many features as there are rows or tokens in all. ``together``: of a module
    that computes several layers, those of its first GEMM forward, its second and so on; they go
    backward in the other order. ``seen``: by layer and GEMM, how often which formats met, in the
    order of ``GEMMS``.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        shape: torch.Size,
        together: Mapping[str, tuple[tuple[str, ...], ...]] | None = None,
    ) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, Counter[tuple[str, str]]]] = {}
        self._layers = layers
        self._together = together or {}
        self._calls: Counter[str] = Counter()
        self._summed_by_wgrad = (shape.numel(), shape[0])
        self._current: str | None = None
        self._backward = False
        self._outer: list[tuple[str | None, bool, Counter[str]]] = []
        self._exits: list[Any] = []

    def __enter__(self) -> GemmWatch:
        for name, layer in self._layers.items():
            self._exits.append(layer.register_forward_pre_hook(self._entering(name)).remove)
            # Also where the forward pass ends early, as that of a recomputed block does.
            leaving = layer.register_forward_hook(self._leaving(name), always_call=True)
            self._exits.append(leaving.remove)
        self._exits.append(_wrap_transformer_engine(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._exits:
            self._exits.pop()()

    def note(self, gemm: str, formats: tuple[str, str]) -> None:
        """One GEMM of the layer that is at work; ``formats`` in the order of ``GEMMS``."""
        if self._current is None:
            return
        inside = self._together.get(self._current, ((self._current,),))
        place = self._calls[gemm] % len(inside)
        self._calls[gemm] += 1
        for layer in inside[place if gemm == "fprop" else -1 - place]:
            of_layer = self.seen.setdefault(layer, {})
            of_layer.setdefault(gemm, Counter())[formats] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = _MATRICES.get(func.overloadpacket.__name__)
        if first is not None and self._current is not None:
            left, right = args[first], args[first + 1]
            gemm = self._gemm(int(left.shape[1]))
            if _announcements:
                left, right = _announcements[-1]
            self.note(gemm, (format_of(left), format_of(right)))
        return func(*args, **(kwargs or {}))

    def _gemm(self, summed: int) -> str:
        if not self._backward:
            return "fprop"
        # wgrad sums over the tokens, or over the rows in a layer of whole sequences.
        return "wgrad" if summed in self._summed_by_wgrad else "dgrad"

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            # A recomputed block goes forward within the backward pass of its last layer.
            self._outer.append((self._current, self._backward, self._calls))
            self._current, self._backward, self._calls = name, False, Counter()

        return hook

    def _leaving(self, name: str) -> Any:
        def backward(grad: Tensor) -> None:
            self._current, self._backward, self._calls = name, True, Counter()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._current, self._backward, self._calls = self._outer.pop()
            if isinstance(output, tuple) and output:
                output = output[0]
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(backward)

        return hook


def _wrap_transformer_engine(watch: GemmWatch) -> Any:
    """Listens at ``generic_gemm``, through which all of its GEMMs go; returns the way back.

    It computes ``B A`` with A the weight (fprop, dgrad) or the input (wgrad), and is called with
    (A, whether A is transposed, B, whether B is, ...): TN is fprop, NN dgrad, NT wgrad.
    """
    module: Any = sys.modules.get("transformer_engine_torch")
    original = getattr(module, "generic_gemm", None)
    if original is None:
        return lambda: None

    def listening(*args: Any, **kwargs: Any) -> Any:
        a, transposed_a, b, transposed_b = args[:4]
        gemm = "fprop" if transposed_a else "wgrad" if transposed_b else "dgrad"
        watch.note(gemm, (format_of(b), format_of(a)))
        return original(*args, **kwargs)

    module.generic_gemm = listening

    def back() -> None:
        module.generic_gemm = original

    return back
