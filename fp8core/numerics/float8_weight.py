"""A weight that lies in E4M3 with one scale, where a frozen weight is kept for its FP8 GEMMs alone.

`Float8Weight` appears in the dtype that the weight had. Engines read its codes as they lie; any
other operation sees the dequantised values, and none may write to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8core.numerics.casts import E4M3, decode, measure_amax, quantize
from fp8core.numerics.current_scaling import current_scale

__all__ = ["Float8Weight", "WeightCast", "cast_weight", "joined_again"]

_ELEMENTS_AT_ONCE = 1 << 22
"""So many are in fp32 at a time while a weight is cast."""
# Of an element that its own scale brings an ulp above the largest number, which it is rounded to.
_LIMIT = E4M3.max * (1 + 2**-20)


@dataclass(frozen=True, eq=False)
class WeightCast:
    """The one cast that weights were given: what FP8 health tells of it. Known by its identity."""

    amax: float
    scale: float
    saturated: float
    underflow: float
    may_hold_nan: bool

    @property
    def figures(self) -> dict[str, float]:
        return {
            "amax": self.amax,
            "scale": self.scale,
            "saturated": self.saturated,
            "underflow": self.underflow,
        }


class Float8Weight(Tensor):
    """``codes`` (E4M3, of any strides) times ``scale_inverse`` (0-dim fp32), as ``dtype``.

    Views, copies and moves to another device are such tensors again, of the same ``cast``.
    """

    _data: Tensor
    _scale_inverse: Tensor
    cast: WeightCast
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale_inverse: Tensor, dtype: torch.dtype, cast: WeightCast
    ) -> Float8Weight:
        made: Float8Weight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made._data = codes
        made._scale_inverse = scale_inverse
        made.cast = cast
        return made

    @property
    def codes(self) -> Tensor:
        """The very bytes, with dtype ``torch.float8_e4m3fn``."""
        return self._data

    @property
    def scale_inverse(self) -> Tensor:
        return self._scale_inverse

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._data.nbytes

    def data_ptr(self) -> int:
        return self._data.data_ptr()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # Only the tensor around the codes would be exchanged, and the codes stay what they were.
        raise TypeError(f"a weight that lies in FP8 is frozen, and does not become {value.dtype}")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, rounded once to ``dtype`` (None: its own)."""
        values = decode(self._data, may_hold_nan=self.cast.may_hold_nan).mul_(self._scale_inverse)
        return values.to(self.dtype if dtype is None else dtype)

    def _alike(self, codes: Tensor, scale_inverse: Tensor | None = None) -> Float8Weight:
        scale = self._scale_inverse if scale_inverse is None else scale_inverse
        return Float8Weight(codes, scale, self.dtype, self.cast)

    def __repr__(self) -> str:  # type: ignore[override]
        shape, scale = tuple(self.shape), self.cast.scale
        return f"Float8Weight(shape={shape}, dtype={self.dtype}, scale={scale}, at {self.device})"

    # With these two, `nn.Module.to` exchanges the tensor as a whole.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, WeightCast]]:
        return ["_data", "_scale_inverse"], (self.dtype, self.cast)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, WeightCast], *_: Any
    ) -> Float8Weight:
        return Float8Weight(inner["_data"], inner["_scale_inverse"], *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Weight:
        if id(self) not in memo:
            copy = self._alike(self._data.clone(), self._scale_inverse.clone())
            copy.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copy._is_param = True
            memo[id(self)] = copy
        found: Float8Weight = memo[id(self)]
        return found

    def __copy__(self) -> Float8Weight:
        copy = self._alike(self._data, self._scale_inverse)
        return copy.requires_grad_(self.requires_grad)  # type: ignore[return-value]

    # There is no memory behind the values: to ask torch for it ends the process.
    def share_memory_(self) -> Float8Weight:
        raise TypeError(
            "a weight that lies in FP8 is not moved to shared memory; share its `dequantize()`"
        )

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any:
        raise BufferError(
            "a weight that lies in FP8 is not handed to other libraries; give them its `codes` as "
            "bytes, or its `dequantize()`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a weight that lies in FP8 is not written to files: it is a rounded copy of what the "
            "model was loaded from; write `dequantize()` to have the rounded values"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Float8Weight):
            if func in _VIEWS:
                found = func(first._data, *args[1:], **kwargs)
                if isinstance(found, Tensor):
                    return first._alike(found)
                return [first._alike(part) for part in found]
            if func is torch.ops.aten._to_copy.default:
                return _moved(first, **kwargs)
        if any(isinstance(value, Float8Weight) for value in _written(func, args, kwargs)):
            raise TypeError(f"{func}: a weight that lies in FP8 is frozen and cannot be written to")
        args, kwargs = tree_map_only(Float8Weight, Float8Weight.dequantize, (args, kwargs))
        return func(*args, **kwargs)


_aten = torch.ops.aten
_VIEWS = {
    _aten._reshape_alias.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.diagonal.default,
    _aten.expand.default,
    _aten.lift_fresh.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unfold.default,
    _aten.unsqueeze.default,
    _aten.view.default,
}
"""What is done to the codes as it would be to the values; copies are among them.

Of any other view one would get values that no longer belong to the weight, and what is written to
those would be lost without a word.
"""


def cast_weight(weights: Sequence[Tensor], *, power_of_two: bool = False) -> list[Float8Weight]:
    """The rows of ``weights``, side by side in one storage, in E4M3 with one scale for them all.

    The scale is that of `current_scale` of their largest amax. ``weights``: of one dtype and device
    (fp32, bf16 or fp16), ``[rows, columns]`` of the same columns. One result for each, which is
    contiguous. Waits for the device.
    """
    first = weights[0]
    amaxes = [measure_amax(piece) for weight in weights for piece in _pieces(weight)]
    amax = torch.stack([found.value for found in amaxes]).amax()
    scale = current_scale(amax, E4M3.max, power_of_two=power_of_two)
    rows = [weight.shape[0] for weight in weights]
    codes = torch.empty((sum(rows), first.shape[1]), dtype=E4M3.dtype, device=first.device)
    lost = torch.zeros((), dtype=torch.int64, device=first.device)
    saturated = torch.zeros_like(lost)
    begin = 0
    for piece in (piece for weight in weights for piece in _pieces(weight)):
        made = quantize(piece, scale, E4M3)
        codes[begin : begin + made.shape[0]].copy_(made)
        begin += made.shape[0]
        lost += torch.count_nonzero(piece) - torch.count_nonzero(made.view(torch.uint8) & 0x7F)
        saturated += torch.count_nonzero((piece.float() * scale).abs_() > _LIMIT)
    elements = max(1, codes.numel())
    cast = WeightCast(
        float(amax),
        float(scale),
        int(saturated) / elements,
        int(lost) / elements,
        any(found.may_hold_nan for found in amaxes),
    )
    whole = Float8Weight(codes, scale.reciprocal(), first.dtype, cast)
    return [whole] if len(rows) == 1 else list(whole.split(rows))


def joined_again(parts: Sequence[Float8Weight]) -> Float8Weight:
    """What was cast together, as one: without a copy where the codes lie one after another.

    Raises ValueError for parts of several casts, whose scales differ.
    """
    first = parts[0]
    if any(part.cast is not first.cast for part in parts):
        raise ValueError("these weights were cast to FP8 each with a scale of its own")
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    if _follow_one_another([part.codes for part in parts]):
        return first._alike(first.codes.as_strided(shape, first.codes.stride()))
    return first._alike(
        torch.cat([part.codes.view(torch.uint8) for part in parts]).view(E4M3.dtype)
    )


def _follow_one_another(codes: Sequence[Tensor]) -> bool:
    expected = codes[0].data_ptr()
    storage = codes[0].untyped_storage().data_ptr()
    for each in codes:
        if not each.is_contiguous() or each.untyped_storage().data_ptr() != storage:
            return False
        if each.data_ptr() != expected:
            return False
        expected += each.numel()
    return True


def _pieces(weight: Tensor) -> Iterator[Tensor]:
    """Its rows, some at a time."""
    return iter(weight.detach().split(max(1, _ELEMENTS_AT_ONCE // max(1, weight.shape[1]))))


def _moved(
    weight: Float8Weight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> Tensor:
    if dtype is not None and dtype != weight.dtype:
        values = weight.dequantize(dtype)
        return values if device is None else values.to(device, non_blocking=non_blocking)
    options = {} if memory_format is None else {"memory_format": memory_format}
    codes = weight.codes.to(
        device or weight.device, non_blocking=non_blocking, copy=True, **options
    )
    return weight._alike(codes, weight.scale_inverse.to(codes.device, copy=True))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that ``func`` writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from found if isinstance(found, list | tuple) else [found]
