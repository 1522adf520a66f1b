"""Pointers lead into the submitted document, which knows nothing of how a part was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8core.spec import Problem

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "model": [
        {"source": "huggingface", "id": "a/b"},
        {"source": "path", "path": "a"},
        {"source": "config", "config": {"model_type": "llama", "config": 1}},
        {"source": "job", "job": "job_1"},
    ],
    "tokenizer": [
        {"source": "model"},
        {"source": "huggingface", "id": "a/b"},
        {"source": "path", "path": "a"},
        {"source": "bytes"},
        {"source": "train"},
    ],
    "data": [
        {"source": "text", "path": "a"},
        {"source": "jsonl", "path": "a"},
        {"source": "parquet", "path": "a"},
        {"source": "huggingface", "id": "a/b", "name": "n"},
        {"source": "upload", "dataset": "a"},
        {"source": "builtin", "name": "python_topics"},
    ],
    "recipe": [
        {},
        {"engine": "te"},
        *(
            {"engine": "te", "scaling": s}
            for s in ("delayed", "current", "block", "mxfp8", "nvfp4")
        ),
        {"scaling": "mxfp8"},
        {"engine": "torchao"},
        {"engine": "torchao", "scaling": "rowwise"},
        {"engine": "emulated"},
        {"engine": "emulated", "scaling": "current"},
        {"engine": "amp"},
    ],
}
CASES = [(section, variant) for section, variants in VARIANTS.items() for variant in variants]
# Keys that are also names of variants would fool anything that only compares names.
STRANGE_KEYS = ["xyzzy", "te", "delayed", "jsonl", "job_", "0", "[key]"]


@pytest.mark.parametrize("key", STRANGE_KEYS)
@pytest.mark.parametrize(("section", "variant"), CASES)
def test_an_unknown_key_of_any_variant(
    spec: Spec, refused: Refused, section: str, variant: dict[str, Any], key: str
) -> None:
    problems = refused(spec(**{section: {**variant, key: 1}}))
    assert list(problems) == [f"/{section}/{key}"]
    assert problems[f"/{section}/{key}"].code in ("unknown_key", "unsupported")


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_a_bad_value_of_any_schedule(spec: Spec, refused: Refused, name: str) -> None:
    schedule: dict[str, Any] = {"name": name, "warmup_steps": -1}
    if name == "warmup_stable_decay":
        schedule["decay_steps"] = 1
    assert list(refused(spec(training={"schedule": schedule}))) == [
        "/training/schedule/warmup_steps"
    ]


def test_a_key_below_a_key_named_like_a_variant(spec: Spec, refused: Refused) -> None:
    data = {"source": "text", "path": "a", "columns": {"text": 3}}
    assert list(refused(spec(data=data))) == ["/data/columns/text"]
    model = {"source": "path", "path": {"path": 1}}
    assert list(refused(spec(model=model))) == ["/model/path"]
