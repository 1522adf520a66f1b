"""Every command of docs/api.md, run in order by a real shell against a real stack."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_command_of_the_page_works(service, tmp_path):
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 12
    script = "set -euxo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "OCTRAIN_API_URL": service.stack.url,
            "OCTRAIN_API_KEY": service.stack.api_key,
            "no_proxy": "*",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    told = done.stdout
    assert "\nsucceeded\n" in told
    assert "\n304\n" in told, "nothing was new"
    assert "/problems/not-found" in told
    assert (tmp_path / "first-block").stat().st_size == 512
    assert (tmp_path / "model.tar").stat().st_size > 512
    assert "train/loss" in (tmp_path / "metrics.csv").read_text()
