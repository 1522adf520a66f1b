"""Depth and size of JSON, found without parsing it: held to what the parser finds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octrain_api.json_bounds import too_complex

TEXTS = st.text(alphabet='[]{},:"\\ab\n\u00e9') | st.text()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=40,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _separators(value: Any) -> int:
    """Commas and opening brackets: what is counted in place of values."""
    if isinstance(value, dict):
        return max(len(value), 1) + sum(map(_separators, value.values()))
    if isinstance(value, list):
        return max(len(value), 1) + sum(map(_separators, value))
    return 0


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_agrees_with_the_parser(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    depth, size = _depth(value), _separators(value)
    assert too_complex(text, max_depth=depth, max_values=size) is None
    if depth > 0:
        assert too_complex(text, max_depth=depth - 1, max_values=size) is not None
        assert too_complex(text, max_depth=depth, max_values=size - 1) is not None


def test_brackets_in_strings_hide_nothing() -> None:
    deep = b'["]",' * 100 + b"0" + b"]" * 100
    assert "100" not in str(json.loads(deep))
    assert too_complex(deep, max_depth=99, max_values=1000) is not None
    assert too_complex(deep, max_depth=100, max_values=1000) is None
    flat = json.dumps(["[" * 1000, '\\"[{' * 100]).encode()
    assert too_complex(flat, max_depth=1, max_values=2) is None


def test_what_is_no_json_is_left_to_the_parser() -> None:
    for text in (b"", b"]]]]", b'"' + b"[" * 1000, b"}{" * 100, b"\xff" * 100):
        assert too_complex(text, max_depth=100, max_values=1000) is None
