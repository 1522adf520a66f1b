"""The demo as it is run, once: everything that it promises to print, and nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from octrain.local.processes import processes

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Demo:
    """What it printed, its exit status, and the folders in which it ran."""

    text: str
    status: int
    folder: Path
    temporary: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "octrain.demo"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(REPOSITORY / folder) for folder in ("", "api", "worker")
            ),
            "COLUMNS": "120",
            "TMPDIR": str(temporary),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,  # it promises less than 4 minutes, on a machine that is free
        check=False,
    )
    print(done.stdout)
    return Demo(done.stdout, done.returncode, folder, temporary)


def test_both_jobs_learn_and_fp8_stays_near_the_baseline(demo: Demo) -> None:
    rows = re.findall(r"llama-\S+ +([\d.]+) +([\d.]+) +[\d,]+\n", demo.text)
    assert len(rows) == 2, demo.text
    # A model that knows nothing stands at ln 1024 = 6.93.
    assert all(float(held_out) < 5.5 for _, held_out in rows), rows
    found = re.search(
        r"Gap of the held-out losses, FP8 - FP32: [+-][\d.]+ \(([+-][\d.]+) %\)", demo.text
    )
    assert found is not None, demo.text
    assert abs(float(found[1])) < 5


def test_it_tells_where_the_service_is_and_what_was_converted(demo: Demo) -> None:
    text = demo.text
    assert re.search(r"The service answers at http://127\.0\.0\.1:\d+ after [\d.]+ s", text), text
    assert len(re.findall(r"POST /v1/jobs -> job_\w+", text)) == 2
    assert re.search(r"llama-(emulated|te)-fp8 +[\d.]+ +[\d.]+ +[\d,]+", text), text
    assert re.search(r"llama-fp32 +[\d.]+ +[\d.]+ +[\d,]+", text), text
    assert re.search(r"Of \d+ layers, \d+ were converted:", text)
    assert re.search(r"\d+ x \w+ -> \w+", text)
    assert re.search(r"1 x Linear kept \(lm_head\): \S+", text), text


def test_models_and_reports_lie_where_it_says(demo: Demo) -> None:
    results = demo.folder / "runs" / "demo"
    folders = sorted(path for path in results.glob("*/*") if path.is_dir())
    assert [folder.name for folder in folders] == ["model", "report"] * 2
    for folder in folders:
        assert str(folder) in demo.text.replace("\n", "")
    assert len(list(results.glob("*/model/model.safetensors"))) == 2


def test_it_ends_well_and_leaves_nothing(demo: Demo) -> None:
    assert demo.status == 0, demo.text
    assert "Everything stopped in" in demo.text
    assert list(demo.temporary.glob("octrain-demo-*")) == []
    # Everything that the demo starts has its folder for temporary files, the servers too.
    mark = os.fsencode(demo.temporary)
    assert [pid for pid in processes() if mark in environment_and_command(pid)] == []


def environment_and_command(pid: int) -> bytes:
    try:
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
    except OSError:
        return b""
