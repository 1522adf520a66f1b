"""The demo: everything that it promises to print, and nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


def check_output(text: str, results: Path) -> None:
    assert re.search(r"The service answers at http://127\.0\.0\.1:\d+ after [\d.]+ s", text), text
    assert len(re.findall(r"POST /v1/jobs -> job_\w+", text)) == 2
    assert re.search(r"llama-(emulated|te)-fp8 +[\d.]+ +[\d.]+ +[\d,]+", text), text
    assert re.search(r"llama-fp32 +[\d.]+ +[\d.]+ +[\d,]+", text), text
    assert re.search(r"Gap of the held-out losses, FP8 - FP32: [+-][\d.]+ \([+-][\d.]+ %\)", text)
    assert re.search(r"Of \d+ layers, \d+ were converted:", text)
    assert re.search(r"\d+ x \w+ -> \w+", text)
    assert re.search(r"1 x Linear kept \(lm_head\): \S+", text), text
    assert "Everything stopped in" in text
    folders = sorted(path for path in results.glob("*/*") if path.is_dir())
    assert [folder.name for folder in folders] == ["model", "report"] * 2
    for folder in folders:
        assert str(folder) in text.replace("\n", "")
    assert len(list(results.glob("*/model/model.safetensors"))) == 2


def test_the_demo_as_it_is_run(tmp_path):
    """Both jobs learn, FP8 stays near the baseline, and all of it in under 4 minutes."""
    done = subprocess.run(
        [sys.executable, "-m", "octrain.demo"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(REPOSITORY / folder) for folder in ("", "api", "worker")
            ),
            "COLUMNS": "120",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    check_output(done.stdout, tmp_path / "runs" / "demo")
    print(done.stdout)
    gap = float(re.findall(r"\(([+-][\d.]+) %\)", done.stdout)[0])
    assert abs(gap) < 5
