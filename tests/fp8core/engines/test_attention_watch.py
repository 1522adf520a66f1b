"""The formats of attention, seen as its kernels are called; those on a GPU are tested there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp8core.engines.attention_watch import AttentionWatch


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("masked", [False, True])
def test_both_passes_are_seen(dtype: torch.dtype, name: str, masked: bool) -> None:
    query = torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool).tril() if masked else None
    with AttentionWatch() as watch:
        output = F.scaled_dot_product_attention(query, query, query, mask, is_causal=not masked)
        output.sum().backward()
    assert watch.seen == {("forward", name): 1, ("backward", name): 1}


def test_nothing_is_seen_where_none_attends() -> None:
    with AttentionWatch() as watch:
        torch.randn(4, 4) @ torch.randn(4, 4)
    assert not watch.seen


def test_transformer_engine_is_listened_to_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(*args: Any) -> str:
        return "computed"

    kernels: Any = SimpleNamespace(fused_attn_fwd=forward, fused_attn_bwd=forward)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", kernels)
    bounds = torch.tensor([0, 16], dtype=torch.int32)
    quantised = SimpleNamespace(_fp8_dtype=SimpleNamespace(name="kFloat8E4M3"))
    query = torch.randn(1, 16, 2, 8, dtype=torch.bfloat16)
    with AttentionWatch() as watch:
        assert kernels.fused_attn_fwd(16, 0.5, bounds, quantised) == "computed"
        assert kernels.fused_attn_bwd(16, 0.5, bounds, query) == "computed"
    assert watch.seen == {("forward", "fp8_e4m3"): 1, ("backward", "bf16"): 1}
    assert kernels.fused_attn_fwd is forward
    assert kernels.fused_attn_bwd is forward
