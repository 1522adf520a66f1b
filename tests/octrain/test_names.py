"""What `import octrain` gives: all that docs/client.md names without a module."""

from __future__ import annotations

import re
from pathlib import Path

import octrain
from octrain.client import OctrainError

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()


def test_every_error_of_the_page_is_a_name_of_octrain() -> None:
    section = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 15
    for name in named:
        assert issubclass(getattr(octrain, name), OctrainError), name


def test_the_names_are_those_of_the_client() -> None:
    import octrain.client

    assert set(octrain.__all__) <= set(octrain.client.__all__)
    assert set(octrain.__all__) <= set(dir(octrain))
    errors = {
        name
        for name in octrain.client.__all__
        if isinstance(getattr(octrain.client, name), type)
        and issubclass(getattr(octrain.client, name), OctrainError)
    }
    assert errors <= set(octrain.__all__), "no error is left out"
