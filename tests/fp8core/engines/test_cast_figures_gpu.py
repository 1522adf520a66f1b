"""The kernel counts what the definitions give, and does not wait for the device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch

from fp8core.engines.cast_figures import CastFigures, CastRule, ScaleFrom, count_with_torch
from tests.fp8core.engines.cast_cases import by_hand, cases
from tests.fp8core.engines.test_cast_figures import figures_of

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
