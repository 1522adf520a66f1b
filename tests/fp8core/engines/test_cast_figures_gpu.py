"""The kernel counts what the definitions give, and does not wait for the device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch

from fp8core.engines.cast_figures import CastFigures, CastRule, ScaleFrom, count_with_torch
from tests.fp8core.engines.cast_cases import by_hand, cases, cases_of_many
from tests.fp8core.engines.test_cast_figures import figures_of
from tests.fp8core.kernel_names import launched, launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("dtype", "fp8_format"),
    [(torch.bfloat16, "e4m3"), (torch.bfloat16, "e5m2"), (torch.float32, "e4m3")],
)
def test_every_case_is_what_the_definitions_give(dtype: torch.dtype, fp8_format: str) -> None:
    # The kernel is compiled for each dtype, source and divisibility: seconds, hence not for all.
    for case in cases("cuda", [dtype], [fp8_format]):
        assert figures_of(case, torch.device("cuda")) == by_hand(case), case.label


def test_a_large_tensor_is_counted_as_torch_counts_it() -> None:
    tensor = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16) * 300
    for source in ScaleFrom:
        rule = CastRule.of("e4m3", source)
        scale = torch.tensor(1.25, device="cuda") if source is ScaleFrom.GIVEN else None
        gathered = CastFigures(["x"], tensor.device)
        gathered.add("x", tensor, rule, scale)
        row = torch.tensor([0, 0x7F800000, 0, 0], dtype=torch.int32, device="cuda")
        count_with_torch(tensor, rule, scale, row)
        assert torch.equal(gathered._bits[0], row), source.name


def test_many_together_are_counted_as_one_by_one() -> None:
    device = torch.device("cuda")
    for rule, tensors in cases_of_many("cuda"):
        together, one_by_one = (CastFigures(list(tensors), device) for _ in range(2))
        for _ in range(2):  # the second time onto what the first counted
            together.add_all(tensors, rule)
            for name, tensor in tensors.items():
                one_by_one.add(name, tensor, rule)
        assert torch.equal(together._bits, one_by_one._bits), rule
        assert len(together.read_later()()) == 4 * (len(tensors) - 1)


@pytest.mark.parametrize("source", [ScaleFrom.TENSOR, ScaleFrom.ROWS])
def test_large_ones_together_are_counted_as_torch_counts_them(source: ScaleFrom) -> None:
    rule = CastRule.of("e4m3", source)
    tensors = {str(n): torch.randn(2048 + n, 4096, device="cuda") * 300 for n in range(4)}
    gathered = CastFigures(list(tensors), torch.device("cuda"))
    gathered.add_all(tensors, rule)
    for tensor, found in zip(tensors.values(), gathered._bits, strict=True):
        row = torch.tensor([0, 0x7F800000, 0, 0], dtype=torch.int32, device="cuda")
        count_with_torch(tensor, rule, None, row)
        assert torch.equal(found, row)


def test_many_take_as_few_launches_as_one_and_no_waiting() -> None:
    rule = CastRule.of("e4m3", ScaleFrom.TENSOR)
    tensors = {str(n): torch.randn(512, 512, device="cuda") for n in range(20)}
    gathered = CastFigures(list(tensors), torch.device("cuda"))
    gathered.add_all(tensors, rule)  # compiles
    others = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gathered.add_all(others, rule)  # of which the addresses are new
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launches(launched(lambda: gathered.add_all(others, rule)), "_count") == 2


def test_adding_never_waits_for_the_device() -> None:
    tensor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones((), device="cuda")
    gathered = CastFigures(["x"], tensor.device)
    rule = CastRule.of("e4m3", ScaleFrom.GIVEN)
    gathered.add("x", tensor, rule, scale)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gathered.clear()
        gathered.add("x", tensor, rule, scale)
        read = gathered.read_later()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read()["x/amax"] == float(tensor.abs().max())
