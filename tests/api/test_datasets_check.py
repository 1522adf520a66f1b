"""The check of uploaded files: every record, with line and reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from octrain_api.artifacts.store import NewFile
from octrain_api.datasets.check import Findings, Order, check

_GOOD_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("content", "changes", "problems"),
    [
        (b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}', {}, []),
        (b'{"text": "a"}\n{"text": \n{"text": 3}\n', {}, [(2, "not JSON"), (3, "a string")]),
        (b'{"body": "a"}\n', {"columns": {"text": "body"}}, []),
        (b'{"body": "a"}\n', {}, [(1, "'text' is missing")]),
        (b'{"text": "\xff"}\n', {}, [(1, "not UTF-8 (byte 11")]),
        (b"\n\n", {}, [(None, "no records")]),
        (b"[" * 100_000, {}, [(1, "not acceptable JSON")]),
        (json.dumps(_GOOD_CHAT).encode(), {"format": "chat"}, []),
        (b'{"messages": []}', {"format": "chat"}, [(1, "list of messages")]),
        (b'{"prompt": "a"}', {"format": "prompt_completion"}, [(1, "'completion' is missing")]),
        (b'{"text": "a", "label": 1}', {"format": "labelled"}, []),
        (b"any text\nat all\n", {"media": "text"}, []),
        (b"any text\n\xff\n", {"media": "text"}, [(2, "not UTF-8")]),
        (b"PAR1 is not enough PAR1", {"media": "parquet"}, [(None, "not a Parquet file")]),
    ],
)
def test_the_check(tmp_path: Path, content: bytes, changes: Any, problems: list[Any]) -> None:
    found = _check(tmp_path, content, **changes)
    assert found.problem_count == len(problems)
    for (line, words), problem in zip(problems, found.problems, strict=True):
        assert problem["line"] == line
        assert words in problem["message"]


def _check(folder: Path, content: bytes, **changes: Any) -> Findings:
    """What the check finds in a file that came in two parts."""
    url = folder.as_uri()
    for name, part in (("parts/1", content[:5]), ("parts/2", content[5:])):
        file = NewFile(url, name)
        file.write(part)
        file.finish()
    columns = {role: role for role in ("text", "prompt", "completion", "messages", "label")}
    columns |= changes.pop("columns", {})
    announced = {"media": "jsonl", "format": "text", **changes}
    digest = hashlib.sha256(content).hexdigest()
    parts = ["parts/1", "parts/2"]
    order = Order(url, parts, "data", len(content), digest, columns=columns, **announced)
    return check(order)


def test_the_check_of_parquet(tmp_path: Path) -> None:
    def content(**columns: Any) -> bytes:
        pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
        return (tmp_path / "t.parquet").read_bytes()

    def found(content: bytes, **changes: Any) -> Findings:
        return _check(tmp_path, content, media="parquet", **changes)

    good = found(content(text=["a", "b", "c"], n=[1, 2, 3]))
    assert (good.rows, good.problems) == (3, [])
    [problem] = found(content(text=["a", "b", None])).problems
    assert (problem["line"], "must be a string" in problem["message"]) == (3, True)
    [problem] = found(content(body=["a"])).problems
    assert "'text' is missing" in problem["message"]
    chats = content(messages=[_GOOD_CHAT["messages"]] * 3)
    assert found(chats, format="chat").problems == []
    assert found(content(text=pa.array([], pa.string()))).problems[0]["line"] is None
    cut = content(text=["a", "b", "c"])[:-20]
    assert "not a Parquet file" in found(cut).problems[0]["message"]


def test_a_line_of_no_end_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octrain_api.datasets.check._LONGEST_LINE", 40)
    long = b'{"text": "' + b"x" * 200 + b'"}'
    found = _check(tmp_path, b'{"text": "a"}\n' + long + b"\n" + b"{\n" + long)
    assert [(p["line"], p["message"][:9]) for p in found.problems] == [
        (2, "the line "),
        (3, "not JSON:"),
        (4, "the line "),
    ]


def test_of_many_problems_the_first_hundred(tmp_path: Path) -> None:
    found = _check(tmp_path, b"{\n" * 250)
    assert (found.problem_count, len(found.problems)) == (250, 100)
    assert [problem["line"] for problem in found.problems] == list(range(1, 101))
