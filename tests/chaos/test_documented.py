"""The tests that docs/reliability.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_named_test_exists() -> None:
    named = _NAMED.findall((REPOSITORY / "docs" / "reliability.md").read_text())
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (REPOSITORY / file).exists()
        or (name and f"def {name}(" not in (REPOSITORY / file).read_text())
    ]
    assert missing == []


def test_every_fault_and_every_complaint_has_its_test() -> None:
    text = (REPOSITORY / "docs" / "reliability.md").read_text()
    tables = ("| fault at a random or chosen instant |", "| reported | here |")
    for table, least in zip(tables, (12, 35), strict=True):
        rows = text.split(table)[1].split("\n\n")[0].splitlines()[2:]
        assert len(rows) >= least
        without = [row for row in rows if not any(name for _, name in _NAMED.findall(row))]
        assert without == []
