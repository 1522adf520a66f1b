"""Which norms are computed by cuDNN's kernels, by what is known of their speed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from fp8core.engines.protocol import NormDescription
from fp8core.engines.te_norms import choose_kernels, cudnn_is_faster

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
