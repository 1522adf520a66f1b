"""The specs that the README and the docs give are valid, and their mistake is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import octrain
from fp8core.spec import SpecInvalid, parse_spec

REPOSITORY = Path(__file__).parents[2]


def specs(page: str) -> list[dict[str, Any]]:
    """Every JSON object of the page that has a model and a recipe."""
    text = (REPOSITORY / page).read_text()
    found = []
    for place in re.finditer(r'^\s*\{\s*"', text, re.MULTILINE):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, text.index("{", place.start()))
        except ValueError:
            continue
        if {"model", "recipe"} <= value.keys():
            found.append(value)
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/spec.md", "docs/trainer.md"])
def test_specs_are_valid(page: str) -> None:
    found = specs(page)
    assert found
    for spec in found:
        parse_spec(spec)


def test_the_mistake_of_the_readme_is_answered_as_it_says() -> None:
    text = (REPOSITORY / "README.md").read_text()
    told = re.search(r'^\{"pointer": .*?\}$', text, re.MULTILINE | re.DOTALL)
    assert told is not None
    problem = json.loads(told[0])
    (spec,) = specs("README.md")
    spec["recipe"][problem["pointer"].rpartition("/")[2]] = 16
    with pytest.raises(SpecInvalid) as raised:
        parse_spec(spec)
    found = [(one.pointer, one.message) for one in raised.value.problems]
    assert found == [(problem["pointer"], problem["message"])]


def test_the_table_of_the_client_is_the_client() -> None:
    client = octrain.Client("http://127.0.0.1:1", "oct_key")
    places: dict[str, object] = {"a job": octrain.Job, "the client itself": client}
    text = (REPOSITORY / "docs/client.md").read_text()
    rows = re.findall(r"^\| (`client\.\w+`|a job|the client itself) \| (.*) \|$", text, re.M)
    assert len(rows) == 7
    for name, members in rows:
        attribute = name.strip("`").removeprefix("client.")
        place = places.get(name) or getattr(client, attribute)
        missing = [one for one in re.findall(r"`(\w+)`", members) if not hasattr(place, one)]
        assert (name, missing) == (name, [])
