"""Documents that cannot be read, or hold what cannot be stored: refused, never a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from fp8core.spec import Problem, parse_spec

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]

UNREADABLE: list[tuple[Any, str, str]] = [
    (b"\xff\xfe", "malformed", "byte 0 cannot be decoded"),
    (b'{"name": "\xc3("}', "malformed", "not UTF-8"),
    (b"", "malformed", "is empty"),
    (b" \n", "malformed", "is empty"),
    ('{"model": ', "malformed", "not JSON"),
    ('{"model": 1,}', "malformed", "not JSON"),
    ("{'model': 1}", "malformed", "not JSON"),
    ("{} {}", "malformed", "not JSON"),
    ("[]", "wrong_type", "not an empty list"),
    ("null", "wrong_type", "not null"),
    ('"spec"', "wrong_type", 'not the text "spec"'),
    ("NaN", "wrong_type", "not the number nan"),
    ("1" * 10_000, "wrong_type", "not the number"),
    (None, "wrong_type", "not null"),
    (17, "wrong_type", "not the number 17"),
    ([("model", 1)], "wrong_type", "a list of 1"),
    ("[" * 1_000_000, "too_deep", "nested deeper than 32"),
    ('{"a":' * 200_000, "too_deep", "nested deeper than 32"),
    (" " * (1024 * 1024 + 1), "too_large", "larger than 1024 KiB"),
    (b" " * (1024 * 1024 + 1), "too_large", "larger than 1024 KiB"),
    ("[" + "1," * 60_000 + "1]", "wrong_type", "a list"),
    ('{"a": [' + "1," * 60_000 + "1]}", "too_large", "more than 50000 values"),
]


@pytest.mark.parametrize(
    ("document", "code", "words"), UNREADABLE, ids=[case[2] for case in UNREADABLE]
)
def test_an_unreadable_document(refused: Refused, document: Any, code: str, words: str) -> None:
    problems = refused(document)
    assert list(problems) == [""]
    assert problems[""].code == code
    assert words in problems[""].message


def test_text_bytes_and_mapping_mean_the_same(spec: Spec) -> None:
    document = spec(name="Grüße")
    text = json.dumps(document, ensure_ascii=False)
    expected = parse_spec(document)
    for same in (
        text,
        text.encode(),
        b"\xef\xbb\xbf" + text.encode(),
        bytearray(text.encode()),
        MappingProxyType(document),
    ):
        assert parse_spec(same) == expected  # type: ignore[arg-type]


def test_a_document_is_not_changed(spec: Spec) -> None:
    document = spec(recipe={"fp8_config": {"backend": "TE", "amax_history_length": 3}})
    before = json.dumps(document)
    parse_spec(document)
    assert json.dumps(document) == before


def test_subclasses_of_text_and_numbers_become_plain(spec: Spec) -> None:
    class Name(StrEnum):
        RUN = "run"

    name = parse_spec(spec(name=Name.RUN)).name
    assert name == "run"
    assert type(name) is str


def test_repeated_keys(refused: Refused) -> None:
    text = (
        '{"model": {"source": "path", "path": "a", "path": "b"}, "data": {"source": "builtin"}, '
        '"recipe": {"margin": 1, "margin": 1}, "recipe": {"margin": 2, "margin": 3}}'
    )
    problems = refused(text)
    assert {pointer: problem.code for pointer, problem in problems.items()} == {
        "/model/path": "duplicate_key",
        "/recipe": "duplicate_key",
        "/recipe/margin": "duplicate_key",
    }


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(spec: Spec, refused: Refused, literal: str) -> None:
    text = json.dumps(spec(training={"optimizer": {"lr": 12345}, "max_grad_norm": 12345}))
    problems = refused(text.replace("12345", literal))
    assert {pointer: problem.code for pointer, problem in problems.items()} == {
        "/training/optimizer/lr": "not_finite",
        "/training/max_grad_norm": "not_finite",
    }


def test_a_number_of_many_digits(spec: Spec, refused: Refused) -> None:
    text = json.dumps(spec(training={"seed": 12345})).replace("12345", "9" * 100_000)
    assert list(refused(text)) == ["/training/seed"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("a\x00b", "bad_format"),
        ("\ud800", "bad_format"),
        ("x" * 70_000, "too_long"),
        (math.nan, "not_finite"),
        (2**70, "out_of_range"),
        (object(), "wrong_type"),
        (b"bytes", "wrong_type"),
        ({1: 2}, "wrong_type"),
        ({"x" * 300: 1}, "too_long"),
        ({"\ud800": 1}, "bad_format"),
        ({1.5, 2.5}, "wrong_type"),
    ],
)
def test_values_that_no_store_takes_wherever_they_are(
    spec: Spec, refused: Refused, value: Any, code: str
) -> None:
    model = {"source": "config", "config": {"model_type": "llama", "extra": [0, value]}}
    problems = refused(spec(model=model))
    assert {pointer: problem.code for pointer, problem in problems.items()} == {
        "/model/config/extra/1": code
    }


def test_a_bad_value_hides_no_other_fault(spec: Spec, refused: Refused) -> None:
    training = {"optimizer": {"betas": [math.nan, 2]}, "steps": 0, "max_grad_norm": "\x00"}
    assert set(refused(spec(training=training))) == {
        "/training/optimizer/betas/0",
        "/training/steps",
        "/training/max_grad_norm",
    }


def test_a_value_that_contains_itself(spec: Spec, refused: Refused) -> None:
    loop: dict[str, Any] = {"model_type": "llama"}
    loop["again"] = loop
    problems = refused(spec(model={"source": "config", "config": loop}))
    assert [problem.code for problem in problems.values()] == ["too_deep"]
    wide: list[Any] = []
    wide += [wide, wide]
    problems = refused(spec(model={"source": "config", "config": {"a": wide}}))
    assert {problem.code for problem in problems.values()} == {"too_deep"}
    assert len(problems) == 100


def test_depth_is_bounded_where_the_spec_itself_is_not(spec: Spec, refused: Refused) -> None:
    def nested(levels: int) -> Any:
        return [nested(levels - 1)] if levels else 1

    # model, config, and the key itself are three levels.
    config = {"model_type": "llama", "deep": nested(29)}
    parse_spec(spec(model={"source": "config", "config": config}))
    config["deep"] = nested(30)
    problems = refused(spec(model={"source": "config", "config": config}))
    assert [problem.code for problem in problems.values()] == ["too_deep"]


def test_long_values_are_quoted_short(spec: Spec, refused: Refused) -> None:
    problems = refused(spec(task="x" * 5000, priority=10**18, labels={"y" * 200: "z"}))
    assert all(len(problem.message) < 300 for problem in problems.values())
