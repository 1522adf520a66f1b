"""Bodies: depth and size, found without parsing; what JSON leaves open, refused at its place."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
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


_SPEC = b'{"model": {"source": "path", "path": "m"}, "recipe": {}, '
# (body, the pointer, words of the message)
STRICT = [
    (b"", "", "empty"),
    (b"  ", "", "empty"),
    (b"\xff\xfe{}", "", "not UTF-8: byte 0"),
    (b"{'a': 1}", "", "line 1, column 2"),
    (b'{"notes": "a", "notes": "b"}', "/notes", "more than once"),
    (_SPEC + b'"data": {"source": "a", "source": "b"}}', "/data/source", "more than once"),
    (b'{"labels": [{"a": 1, "a": 1}]}', "/labels/0/a", "more than once"),
    (b'{"priority": ' + b"9" * 6000 + b"}", "/priority", "too large a number"),
    (b'{"a": [0, 1e400]}', "/a/1", "finite number"),
    (b'{"a/b": NaN}', "/a~1b", "finite number"),
    (b'{"a": ["b\\u0000"]}', "/a/0", "U+0000"),
    (b'{"labels": {"\\ud800": "b"}}', "/labels", "surrogate"),
]


@pytest.mark.parametrize(
    "value", [["2026-01-31T12:00:00+00:00", "\ud800"], ["2026-01-31T12:00:00+00:00", "a\0"], 1e999]
)
async def test_no_cursor_asks_what_the_database_cannot_hold(service: Any, value: Any) -> None:
    user = await service.user()
    for path, order in (("/jobs", ["-created_at"]), ("/datasets", []), ("/webhooks", [])):
        given = [*order, *value] if isinstance(value, list) else value
        cursor = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
        answer = await user.get(path, params={"cursor": cursor})
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "cursor"), path


@pytest.mark.parametrize("body", [b"null", b'"text"', b"1", b"[]", b"true"])
async def test_a_body_that_is_no_object_is_refused(service: Any, body: bytes) -> None:
    user = await service.user()
    for path in ("/jobs", "/jobs?draft=true", "/recipes"):
        answer = await user.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text


@pytest.mark.parametrize(("body", "pointer", "words"), STRICT)
async def test_what_json_leaves_open_is_refused_on_every_route(
    service: Any, submit: Any, body: bytes, pointer: str, words: str
) -> None:
    user = await service.user()
    admin = service.client(await service.key("root", "admin"))
    job_id = await submit(user)
    for client, method, path, kind in (
        (user, "POST", "/jobs", "spec-invalid"),
        (user, "POST", "/jobs?draft=true", "spec-invalid"),
        (user, "POST", "/jobs:validate", "spec-invalid"),
        (user, "PATCH", f"/jobs/{job_id}", "request-invalid"),
        (user, "POST", "/recipes", "request-invalid"),
        (user, "POST", "/webhooks", "request-invalid"),
        (admin, "POST", "/keys", "request-invalid"),
        (service.client(None), "POST", "/session", "request-invalid"),
    ):
        headers = {"Content-Type": "application/json", "Idempotency-Key": "one"}
        answer = await client.request(method, path, content=body, headers=headers)
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (422, f"/problems/{kind}"), path
        [error] = problem["errors"]
        assert error["pointer"] == pointer, (path, problem)
        assert words in error["message"], (path, problem)
        assert "set_int_max_str_digits" not in answer.text
    assert len((await user.get("/jobs")).json()["items"]) == 1
