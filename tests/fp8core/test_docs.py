"""What docs/trainer.md shows is what the program does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fp8core.commands.cli import main
from fp8core.spec import ExitCode, parse_spec
from fp8core.training import workdir

PAGE = (Path(__file__).parents[2] / "docs/trainer.md").read_text()


def test_the_spec_of_the_page_is_valid_and_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    parse_spec(text[1])
    path = tmp_path / "spec.json"
    path.write_text(text[1])
    assert main(["validate", str(path)]) == 0
    assert main(["plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.partition("ok\n")[2])
    assert plan["conversion"]["converted"] == 19
    path.write_text(text[1].replace("amax_history_len", "amax_hist_len"))
    assert main(["validate", str(path)]) == 2
    assert capsys.readouterr().out in PAGE


def test_the_table_of_exit_codes_is_complete() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(c.value, c.name) for c in ExitCode]


def test_every_name_of_the_workdir_is_on_the_page() -> None:
    for name in workdir._FOLDERS | workdir._FILES:
        assert name in PAGE, name
    changeable = PAGE.rpartition("Only ")[2].partition(" may change")[0]
    assert set(re.findall(r"`(\w+)`", changeable)) == workdir._FREE
