"""Weights that lie in FP8: what they are cast to, and what each operation sees of them."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.numerics.casts import E4M3, quantize
from fp8core.numerics.float8_weight import Float8Weight, cast_weight, joined_again


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_scaled_by_its_amax_and_rounded_to_the_nearest_number(
    dtype: torch.dtype,
) -> None:
    """Beside all 256 numbers of the format in float64."""
    weight = values(24, 32, dtype=dtype)
    (stored,) = cast_weight([weight])
    table = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).double()
    table = table[table.isfinite()].unique()
    scale = 448.0 / weight.double().abs().max()
    scaled = weight.double() * scale
    least = (scaled[..., None] - table).abs().amin(dim=-1)
    # The product is rounded to fp32, and what then lies between two numbers may go to either.
    assert ((stored.codes.double() - scaled).abs() <= least + 1e-6 * scaled.abs()).all()
    assert stored.scale_inverse.item() == pytest.approx(1 / scale.item(), rel=1e-6)
    assert stored.cast.amax == float(weight.abs().max())
    assert stored.cast.scale == pytest.approx(scale.item(), rel=1e-6)
    assert stored.dtype == dtype
    assert stored.nbytes == weight.numel()
    error = (stored.dequantize(torch.float32) - weight.float()).abs().max()
    assert 0 < error <= 16 / scale * 1.001


def test_weights_of_one_gemm_share_the_scale_and_lie_together() -> None:
    weights = [values(rows, 48, seed=rows) * rows for rows in (32, 16, 8)]
    parts = cast_weight(weights)
    joined = torch.cat(weights)
    scale = 448.0 / joined.float().abs().max()
    assert torch.equal(torch.cat([p.codes.float() for p in parts]), quantized(joined, scale))
    whole = joined_again(parts)
    assert whole.shape == (56, 48)
    assert whole.codes.data_ptr() == parts[0].codes.data_ptr()
    assert whole.codes.untyped_storage().nbytes() == 56 * 48
    apart = [part.to("cpu", copy=True) for part in parts]
    assert torch.equal(joined_again(apart).codes.float(), whole.codes.float())
    with pytest.raises(ValueError, match="each with a scale of its own"):
        joined_again([parts[0], cast_weight([weights[1]])[0]])


def quantized(weight: Tensor, scale: Tensor) -> Tensor:
    return quantize(weight, scale, E4M3).float()


def test_a_power_of_two_is_asked_for_by_the_recipe() -> None:
    (stored,) = cast_weight([values(16, 16)], power_of_two=True)
    assert stored.cast.scale == 2.0 ** int(torch.tensor(stored.cast.scale).log2())
    assert 224 <= stored.cast.amax * stored.cast.scale <= 448


def test_the_figures_tell_of_what_the_cast_lost() -> None:
    weight = torch.zeros(16, 32)
    weight[0, 0], weight[1, :4], weight[2, :3] = 448.0, 2.0**-11, 1.0
    (stored,) = cast_weight([weight])
    assert stored.cast.figures == {
        "amax": 448.0,
        "scale": 1.0,
        "saturated": 0.0,
        "underflow": 4 / weight.numel(),
    }
    zeros = cast_weight([torch.zeros(16, 16)])[0]
    assert zeros.cast.scale == 1.0
    assert not zeros.dequantize().any()


def test_a_cast_in_pieces_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = values(64, 48)
    (whole,) = cast_weight([weight])
    monkeypatch.setattr("fp8core.numerics.float8_weight._ELEMENTS_AT_ONCE", 5 * 48)
    (pieces,) = cast_weight([weight])
    assert torch.equal(pieces.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert pieces.cast.figures == whole.cast.figures


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "rows": lambda w: w[3:9],
    "narrow": lambda w: w.narrow(0, 2, 5),
    "split": lambda w: w.split([10, 22])[1],
    "turned": lambda w: w.t(),
    "turned and laid out": lambda w: w.t().contiguous(),
    "clone": lambda w: w.clone(),
    "to its own device": lambda w: w.to("cpu", copy=True),
    "data": lambda w: w.data,
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_moves_values_moves_the_codes(name: str) -> None:
    (stored,) = cast_weight([values(32, 48)])
    found = VIEWS[name](stored)
    assert isinstance(found, Float8Weight)
    expected = VIEWS[name](stored.dequantize())
    assert torch.equal(found.dequantize(), expected)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert found.cast is stored.cast


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda w: w + 1,
    "norm": lambda w: torch.linalg.vector_norm(w, dtype=torch.float32),
    "bytes": lambda w: w.reshape(-1).view(torch.uint8),
    "finite": lambda w: w.isfinite().all(),
    "cat": lambda w: torch.cat([w, w]),
    "linear": lambda w: nn.functional.linear(values(4, 48, seed=1), w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_operation_sees_the_values(name: str) -> None:
    (stored,) = cast_weight([values(32, 48)])
    found = OTHERS[name](stored)
    assert type(found) is Tensor
    assert torch.equal(found, OTHERS[name](stored.dequantize()))


def test_another_dtype_is_rounded_to_once() -> None:
    (stored,) = cast_weight([values(32, 48)])
    exact = stored.codes.double() * stored.scale_inverse.double()
    assert torch.equal(stored.float(), exact.float())
    assert torch.equal(stored.to(torch.bfloat16), exact.float().bfloat16())


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_go_through_a_layer_that_holds_one(autocast: bool) -> None:
    found = []
    for weight in (cast_weight([values(32, 48)])[0], cast_weight([values(32, 48)])[0].dequantize()):
        layer = nn.Linear(48, 32, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        x = values(4, 48, seed=2).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(x)
        output.float().square().sum().backward()
        found.append((output.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert torch.equal(one, other)


PARTS: list[Callable[[Tensor], Tensor]] = [
    lambda w: w[3],
    lambda w: w[:, 5],
    lambda w: w[4:8, ::3],
    lambda w: w[None],
    lambda w: w[None].squeeze(0),
    lambda w: w[:1].squeeze(),
    lambda w: w.view(-1),
    lambda w: w.view(8, 4, 48),
    lambda w: w.flatten(),
    lambda w: w.t().unflatten(0, (4, 12)),
    lambda w: w.permute(1, 0),
    lambda w: w.T,
    lambda w: w.unbind(1)[2],
    lambda w: w.chunk(3)[2],
    lambda w: w.expand(2, 32, 48)[1],
    lambda w: w.diagonal(),
    lambda w: w.unfold(1, 8, 8),
    lambda w: w.as_strided((5, 3), (48, 2), 7),
    lambda w: w.narrow(1, 3, 4).data,
]


@pytest.mark.parametrize("view", PARTS)
def test_views_are_of_the_same_cast_and_show_the_same_values(
    view: Callable[[Tensor], Tensor],
) -> None:
    (stored,) = cast_weight([values(32, 48)])
    found = view(stored)
    assert isinstance(found, Float8Weight)
    assert found.cast is stored.cast
    assert found.codes.untyped_storage().data_ptr() == stored.codes.untyped_storage().data_ptr()
    assert torch.equal(found.dequantize(), view(stored.dequantize()))
    assert torch.equal(found + 0, view(stored.dequantize()))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.data.mul_(2),
        lambda w: w.copy_(torch.zeros(32, 48)),
        lambda w: torch.add(values(32, 48), 1, out=w),
        lambda w: setattr(w, "data", torch.zeros(32, 48)),
        *(lambda w, view=view: view(w).zero_() for view in PARTS),
    ],
)
def test_nothing_writes_to_it(write: Callable[[Tensor], Any]) -> None:
    (stored,) = cast_weight([values(32, 48)])
    before = stored.dequantize()
    with pytest.raises(TypeError, match="lies in FP8 is frozen"):
        write(stored)
    assert torch.equal(stored.dequantize(), before)


def test_it_is_copied_moved_with_its_module_and_not_pickled() -> None:
    layer = nn.Linear(48, 32, bias=False)
    layer.weight = nn.Parameter(cast_weight([values(32, 48)])[0], requires_grad=False)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, Float8Weight)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, Float8Weight)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    assert torch.equal(twin.weight.dequantize(), layer.weight.dequantize())
    assert not twin.weight.requires_grad
    assert copy.deepcopy(twin.requires_grad_(True)).weight.requires_grad
    layer.to("meta")
    assert isinstance(layer.weight, Float8Weight)
    assert layer.weight.codes.device.type == "meta"
    with pytest.raises(TypeError, match="not written to files"):
        torch.save(twin.state_dict(), io.BytesIO())


def test_nothing_is_given_memory_that_it_has_not() -> None:
    (stored,) = cast_weight([values(32, 48)])
    with pytest.raises(TypeError, match="shared memory"):
        stored.share_memory_()
    layer = nn.Linear(48, 32, bias=False)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    with pytest.raises(TypeError, match="shared memory"):
        layer.share_memory()
    with pytest.raises(BufferError, match="other libraries"):
        torch.from_dlpack(stored)
    with pytest.raises(RuntimeError):
        stored.numpy(force=True)


def test_a_shallow_copy_has_the_same_codes() -> None:
    (stored,) = cast_weight([values(32, 48)])
    found = copy.copy(stored)
    assert isinstance(found, Float8Weight)
    assert found is not stored
    assert found.codes.data_ptr() == stored.codes.data_ptr()
    assert found.cast is stored.cast
    assert not found.requires_grad


def test_it_takes_the_place_of_a_parameter_for_all_that_hold_it() -> None:
    """As `torch.utils.swap_tensors` exchanges what a Parameter is, and frees what it held."""
    parameter = nn.Parameter(values(32, 48), requires_grad=False)
    held = [parameter]
    storage = weakref.ref(parameter.untyped_storage())
    torch.utils.swap_tensors(
        parameter, nn.Parameter(cast_weight([parameter])[0], requires_grad=False)
    )
    assert held[0] is parameter
    assert isinstance(held[0], Float8Weight)
    assert storage() is None
