"""A minimal valid spec, and the problems of a faulty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8core.spec import Problem, SpecInvalid, parse_spec

Spec = Callable[..., dict[str, Any]]
Refused = Callable[[Any], dict[str, Problem]]


@pytest.fixture(scope="session")
def spec() -> Spec:
    """Makes a minimal spec with some sections replaced."""

    def make(**sections: Any) -> dict[str, Any]:
        return {
            "model": {"source": "path", "path": "models/tiny"},
            "data": {"source": "jsonl", "path": "train.jsonl"},
            "recipe": {},
            **sections,
        }

    return make


@pytest.fixture(scope="session")
def refused() -> Refused:
    """The problems of a document by pointer; fails where the document is accepted."""

    def problems(document: Any) -> dict[str, Problem]:
        with pytest.raises(SpecInvalid) as caught:
            parse_spec(document)
        found = caught.value.problems
        assert found
        by_pointer = {problem.pointer: problem for problem in found}
        assert len(by_pointer) == len(found), "one problem a place"
        return by_pointer

    return problems
