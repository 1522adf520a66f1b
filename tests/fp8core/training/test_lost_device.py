"""After a failure of the GPU nothing is freed: the process says what happened, and is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.commands import train
from fp8core.training.learner import Learner

Job = Callable[..., Path]


class Left(BaseException):
    """The process would be gone by now."""


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA Error: an illegal memory access was encountered"), True),
        (RuntimeError("something else"), False),
    ],
    ids=["PyTorch", "Transformer Engine", "no device"],
)
def test_a_failed_gpu_is_left_as_it_is(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, leaves: bool
) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("fp8core.commands.train.os._exit", leave)
    monkeypatch.setattr(Learner, "gradients", fail)
    spec, work = job(recipe={"engine": "amp", "dtype": "fp32"}), tmp_path / "work"
    if leaves:
        with pytest.raises(Left):
            train.run_train(spec, work, [])
    else:
        assert train.run_train(spec, work, []) == 1
    assert codes == ([1] if leaves else [])
    result = json.loads((work / "result.json").read_bytes())
    assert (result["outcome"], result["exit_code"]) == ("failed", 1)
    assert str(error) in result["detail"]
    assert str(error) in (work / "crash.log").read_text()
