"""Which norm kernels Transformer Engine is told to take."""

from __future__ import annotations

import os

import pytest

from fp8core.fusion.te_norms import choose_norm_kernels

VARIABLES = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")


@pytest.mark.parametrize(("width", "chosen"), [(2048, None), (4096, None), (3072, "1"), (96, "1")])
def test_cudnn_has_the_widths_that_are_not_tuned(
    monkeypatch: pytest.MonkeyPatch, width: int, chosen: str | None
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back afterwards
        monkeypatch.delenv(variable)
    choose_norm_kernels(width)
    assert [os.environ.get(variable) for variable in VARIABLES] == [chosen, chosen]


def test_what_is_set_by_hand_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "0")
    choose_norm_kernels(3072)
    assert [os.environ[variable] for variable in VARIABLES] == ["0", "0"]
