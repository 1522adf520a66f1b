"""The spec of a workdir: what may change between two runs, and what must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8core.errors import SpecRefused
from fp8core.spec import JobSpec, parse_spec
from fp8core.training.workdir import Workdir


def spec_of(**training: Any) -> JobSpec:
    return parse_spec(
        {
            "model": {"source": "config", "config": {"model_type": "llama"}},
            "data": {"source": "builtin"},
            "recipe": {"engine": "emulated"},
            "training": training,
        }
    )


@pytest.fixture
def begun(tmp_path: Path) -> Workdir:
    """With a checkpoint of ``spec_of(steps=5)``."""
    workdir = Workdir(tmp_path)
    workdir.adopt(spec_of(steps=5))
    (workdir.checkpoints / "step-00000001").mkdir(parents=True)
    return workdir


def test_another_spec_is_refused_with_its_pointer(begun: Workdir) -> None:
    begun.adopt(spec_of(steps=5))
    with pytest.raises(SpecRefused, match="differs from the spec") as raised:
        begun.adopt(spec_of(steps=6))
    assert raised.value.pointer == "/training/steps"
    assert json.loads(begun.spec.read_bytes())["training"]["steps"] == 5


def test_a_field_that_came_with_a_newer_version_has_its_default(begun: Workdir) -> None:
    older = json.loads(begun.spec.read_bytes())
    for part, field in (("training", "cuda_graphs"), ("conversion", "fuse")):
        del older[part][field]
    del older["secrets"]
    begun.spec.write_text(json.dumps(older))
    begun.adopt(spec_of(steps=5))
    begun.spec.write_text(json.dumps(older))
    with pytest.raises(SpecRefused) as raised:
        begun.adopt(spec_of(steps=5, cuda_graphs="off"))
    assert raised.value.pointer == "/training/cuda_graphs"


def test_a_field_that_this_version_does_not_know_is_a_difference(begun: Workdir) -> None:
    newer = json.loads(begun.spec.read_bytes())
    newer["training"]["of_tomorrow"] = True
    begun.spec.write_text(json.dumps(newer))
    with pytest.raises(SpecRefused) as raised:
        begun.adopt(spec_of(steps=5))
    assert raised.value.pointer == "/training/of_tomorrow"


@pytest.mark.parametrize("damaged", ["", '{"model": ', "[]", "\\x00", "[" * 100_000])
def test_beside_a_damaged_spec_no_other_is_taken_for_it(begun: Workdir, damaged: str) -> None:
    begun.spec.write_text(damaged)
    with pytest.raises(
        SpecRefused, match=r"spec\.json cannot be read .* put it back, or remove it"
    ):
        begun.adopt(spec_of(steps=6))
    begun.spec.unlink()
    begun.adopt(spec_of(steps=6))  # checkpoints that were fetched from elsewhere
