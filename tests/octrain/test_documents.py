"""Documents that a person gives, and Accelerate's configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from fp8core.spec import parse_spec
from octrain.cli.diff import spec_differences
from octrain.cli.documents import apply_settings, read_document, yaml_value
from octrain.cli.exits import MEANINGS, Exit
from octrain.cli.importing import from_accelerate
from octrain.cli.options import moment, span

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
STAND_INS = {
    "model": {"source": "path", "path": "model"},
    "data": {"source": "jsonl", "path": "data"},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("007", 7),
        ("0x1f", 31),
        ("no", "no"),
        ("true", True),
        ("2026-01-31", "2026-01-31"),
        ("~", None),
        ("", None),
        ("[1, a, null]", [1, "a", None]),
        ("1_000", "1_000"),
    ],
)
def test_yaml_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = yaml_value(text, "x")
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "twice"),
        ("1: a\n", "must be text"),
        ("a: [1\n", "is not YAML"),
        ("a: !!python/object:os.system {}\n", "is not YAML"),
        ("&a [*a]", "cannot be read"),
        ("[" * 3000, "cannot be read"),
        ("text", "must hold a JSON object"),
        ("", "not nothing"),
    ],
)
def test_a_document_that_means_nothing_is_wrong_usage(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(typer.BadParameter, match=said):
        read_document(str(path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("spec.json", '{"model": {"a": 1, "a": 2}}', "/model/a: is given more than once"),
        ("spec.json", '{"a": [1, 1e400]}', "/a/1: must be a finite number"),
        ("spec.json", f'{{"a": {"9" * 6000}}}', "/a: is too large a number"),
        ("spec.yaml", f"a: {'9' * 6000}", "/a: is too large a number"),
        ("spec.yaml", "a: {b: 1e400}", "/a/b: must be a finite number"),
        ("spec.json", "", "is empty"),
    ],
)
def test_what_a_document_leaves_open_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(typer.BadParameter) as refused:
        read_document(str(tmp_path / name))
    assert said in str(refused.value)
    assert "set_int_max_str_digits" not in str(refused.value)


def test_settings_reach_every_place() -> None:
    before: dict[str, Any] = {"a": {"b": 1}, "l": [{"x": 1}, 2]}
    settings = ["a.b=2", "a.c.d=[1]", "l.0.x=null", "l.1=word", "/labels/a.b~1c=yes", "e="]
    after = apply_settings(before, settings)
    assert after == {
        "a": {"b": 2, "c": {"d": [1]}},
        "l": [{"x": None}, "word"],
        "labels": {"a.b/c": "yes"},
        "e": "",
    }
    assert before == {"a": {"b": 1}, "l": [{"x": 1}, 2]}
    for wrong in ("a", "=1", "a..b=1", "l.7=1", "l.x=1", "a.b=[1"):
        with pytest.raises(typer.BadParameter):
            apply_settings(before, [wrong])


def test_an_accelerate_configuration_becomes_a_recipe() -> None:
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "downcast_bf16": "no",
        "mixed_precision": "fp8",
        "fp8_config": {
            "backend": "TE",
            "fp8_format": "hybrid",
            "amax_history_length": 64,
            "amax_compute_algorithm": "max",
            "opt_level": "O2",
        },
        "fsdp_config": {"fsdp_version": 2},
        "num_machines": 1,
        "num_processes": 4,
    }
    found = from_accelerate(config)
    assert found.spec["resources"] == {"gpus": 4}
    recipe = found.spec["recipe"]
    assert (recipe["engine"], recipe["fp8_format"], recipe["amax_history_len"]) == (
        "te",
        "HYBRID",
        64,
    )
    parse_spec({**STAND_INS, **found.spec})
    assert {row["setting"] for row in found.refused} == {"fp8_config/opt_level", "fsdp_config"}
    mapped = {row["setting"]: row["to"] for row in found.mapped}
    assert mapped["fp8_config/amax_history_length"] == "/recipe/amax_history_len"
    assert mapped["fp8_config/backend"] == "/recipe/engine"
    told = {row["setting"] for row in found.mapped + found.refused + found.left_out}
    assert {name.partition("/")[0] for name in told} == set(config), "nothing goes without a word"


@pytest.mark.parametrize(
    ("config", "recipe", "refused"),
    [
        ({"mixed_precision": "bf16"}, {"engine": "amp", "dtype": "bf16"}, set()),
        ({"mixed_precision": False}, {"engine": "amp", "dtype": "fp32"}, set()),
        ({"mixed_precision": ["fp8"]}, None, {"mixed_precision"}),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}},
            None,
            {"fp8_config/backend"},
        ),
        ({"mixed_precision": "fp8", "fp8_config": 3}, {"engine": "te"}, {"fp8_config"}),
        (
            {"mixed_precision": "bf16", "fp8_config": {"backend": "TE"}, "num_machines": 2},
            {"engine": "amp", "dtype": "bf16"},
            {"fp8_config", "num_machines"},
        ),
    ],
)
def test_what_cannot_be_taken_over_is_said(
    config: dict[str, Any], recipe: dict[str, Any] | None, refused: set[str]
) -> None:
    found = from_accelerate(config)
    made = found.spec.get("recipe")
    assert (made if made is None else {key: made[key] for key in recipe or made}) == recipe
    assert {row["setting"] for row in found.refused} == refused


def test_differences_have_pointers() -> None:
    a = {"x": {"y/z": 1, "same": 1}, "only_a": None, "t": True}
    b = {"x": {"y/z": 2, "same": 1.0}, "only_b": [1], "t": 1}
    assert spec_differences(a, b) == [
        {"pointer": "/x/y~1z", "a": 1, "b": 2},
        {"pointer": "/only_a", "a": None},
        {"pointer": "/t", "a": True, "b": 1},
        {"pointer": "/only_b", "b": [1]},
    ]


def test_times() -> None:
    assert span("90s", "--x").total_seconds() == 90
    assert span("2d", "--x").total_seconds() == 172_800
    later = moment("2026-01-31T12:00:00+01:00", "--x")
    assert later is not None
    assert later.isoformat()[-6] in "+-"
    for wrong in ("yesterday", "5", "-1h", "99999999d"):
        with pytest.raises(typer.BadParameter):
            moment(wrong, "--x")


def test_the_page_shows_the_table_of_exit_statuses() -> None:
    assert set(MEANINGS) == set(Exit)
    page = (DOCS / "cli.md").read_text()
    for code, meaning in MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in page


def test_the_page_of_features_has_each_once_and_names_tests_that_are_there() -> None:
    numbers: list[int] = []
    for row in (DOCS / "features.md").read_text().splitlines():
        found = re.match(r"\| (\d[\d, to]*) \|", row)
        if found is None:
            continue
        first, _, last = found[1].partition(" to ")
        listed = [int(number) for number in first.split(", ")]
        numbers += range(listed[0], int(last) + 1) if last else listed
        shown_by = re.findall(r"`([^`]+)`", row.split(" | ")[-1])
        assert shown_by or "**left out**" in row, row
        for name in shown_by:
            assert (TESTS / name).exists(), f"{found[1]}: {name}"
    assert sorted(numbers) == list(range(1, 75))
