"""Transformer Engine still does what the golden traces say: recorded once more on this GPU.

With the versions and the card of the golden traces every bit is the same. With others its GEMMs may
sum in another order, and so train other weights; then what holds of the golden traces must hold of
the new ones, replayed on the CPU.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fp8core.engines import test_golden_traces as replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MADE_WITH = ("torch", "device", "transformer_engine")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformer_engine.pytorch")
    folder = tmp_path_factory.mktemp("traces")
    runpy.run_path(str(replay.GOLDEN / "record_te.py"))["main"](folder)
    return folder


@pytest.fixture
def replayed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The replay reads the new traces."""
    monkeypatch.setattr(replay, "GOLDEN", recorded)
    replay.traces.cache_clear()
    yield
    replay.traces.cache_clear()


def test_the_same_versions_give_the_same_bits(recorded: Path) -> None:
    meta = json.loads((recorded / "te_meta.json").read_bytes())
    assert meta["settings"] == replay.META["settings"]
    if any(meta[key] != replay.META[key] for key in MADE_WITH):
        pytest.skip(f"the golden traces were made with {[replay.META[k] for k in MADE_WITH]}")
    for name in ("scales", "tensors"):
        golden = load_file(replay.GOLDEN / f"te_{name}.safetensors")
        now = load_file(recorded / f"te_{name}.safetensors")
        assert now.keys() == golden.keys()
        other = [key for key, value in golden.items() if not same_bits(now[key], value)]
        assert not other, f"{len(other)} of {len(golden)} {name} differ: {other[:8]}"


@pytest.mark.usefixtures("replayed")
def test_the_new_traces_are_replayed_as_the_golden_ones() -> None:
    for key in replay.SETTINGS:
        replay.test_histories_and_scales_follow_from_the_amaxes_bit_for_bit(key)
    for key in replay.WITH_TENSORS:
        replay.test_each_layer_and_step_is_reproduced_teacher_forced(key)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
