"""The page of features names tests and routes that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "features.md"
DOCUMENT = Path(__file__).with_name("openapi.json")


def test_every_test_and_route_of_the_page_exists() -> None:
    # "7", "7, 8" or "39 to 41" at the head of a row; the heads of the tables have no number.
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows) > 60
    paths = [
        re.sub(r"\{[^}]*\}", "{}", path.removeprefix("/v1"))
        for path in json.loads(DOCUMENT.read_text())["paths"]
    ]
    for row in rows:
        _, _, name, here, shown, _ = row.split("|")
        assert re.search(r"\*\*.+\*\*", here) or shown.strip(), name
        for test in re.findall(r"`([^`]+)`", shown):
            assert (TESTS / test).exists(), (name, test)
        for route in re.findall(r"`(?:GET |POST |PATCH )?(/[a-z/{}:.]*)", here):
            meant = re.sub(r"\{[^}]*\}", "{}", route)
            # The pages of problems are for people, and `/resume` stands for a job's.
            known = [*paths, "/problems/{}", "/openapi.json"]
            assert any(path.endswith(meant) for path in known), (name, route)
