"""Which norms are computed by cuDNN's kernels, by what is known of their speed."""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_norms import choose_kernels, cudnn_is_faster, use_cudnn

HOPPER, BLACKWELL = (9, 0), (10, 0)


def norm_of(*shape: int, kind: str = "rms_norm") -> NormDescription:
    weight = nn.Parameter(torch.ones(shape))
    bias = nn.Parameter(torch.zeros(shape)) if kind == "layer_norm" else None
    return NormDescription(kind, shape, 1e-5, weight, bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1536, 2304, 2560, 3072, 3584, 5120, 6144])
def test_widths_without_a_kernel_of_their_own_gain(width: int) -> None:
    assert cudnn_is_faster(norm_of(width), HOPPER)


@pytest.mark.parametrize("width", [64, 128, 512, 768, 1024, 1280, 2048, 4096, 8192])
def test_tuned_and_narrow_widths_stay(width: int) -> None:
    assert not cudnn_is_faster(norm_of(width), HOPPER)


def test_what_was_not_measured_stays() -> None:
    assert not cudnn_is_faster(norm_of(3072, kind="layer_norm"), HOPPER)
    assert not cudnn_is_faster(norm_of(3072), BLACKWELL)
    assert not cudnn_is_faster(norm_of(3, 3072), HOPPER)


def test_a_model_on_a_cpu_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_NORM_FWD_USE_CUDNN", raising=False)
    choose_kernels(norm_of(3072))
    assert "NVTE_NORM_FWD_USE_CUDNN" not in os.environ


def test_both_directions_are_told_and_another_version_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN"):
        monkeypatch.setenv(name, "untouched")
    package, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    package.common = common  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    told: dict[str, bool] = {}

    def note(direction: str, by_cudnn: ctypes.c_bool) -> None:
        told[direction] = by_cudnn.value

    forward_alone = SimpleNamespace(nvte_enable_cudnn_norm_fwd=lambda on: note("forward", on))
    for library in (None, SimpleNamespace(), forward_alone):
        common._TE_LIB_CTYPES = library  # type: ignore[attr-defined]
        assert not use_cudnn(forward=True, backward=True)
    assert told == {}
    assert os.environ["NVTE_NORM_FWD_USE_CUDNN"] == "untouched"
    forward_alone.nvte_enable_cudnn_norm_bwd = lambda on: note("backward", on)
    assert use_cudnn(forward=True, backward=False)
    assert told == {"forward": True, "backward": False}
    assert os.environ["NVTE_NORM_FWD_USE_CUDNN"] == "1"
    assert os.environ["NVTE_NORM_BWD_USE_CUDNN"] == "0"
