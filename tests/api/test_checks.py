"""Files that a spec names: their place, and the rows of shared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octrain_api.jobs.checks import check_files

COLUMNS = {n: n for n in ("text", "prompt", "completion", "messages", "label")}


def _spec(path: str, source: str = "jsonl", data_format: str = "text") -> dict[str, Any]:
    return {
        "model": {"source": "config"},
        "tokenizer": {"source": "bytes"},
        "data": {"source": source, "path": path, "format": data_format, "columns": COLUMNS},
    }


def _check(root: Path, path: str, limit: int = 2**20, **more: Any) -> list[tuple[str, int | None]]:
    errors = check_files(_spec(path, **more), [root.resolve()], [], limit)
    assert all(error.pointer == "/data/path" for error in errors)
    return [(error.message, error.line) for error in errors]


GOOD = {
    "text": {"text": "hello"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "labelled": {"text": "a", "label": "x"},
}
BAD = [
    ("text", "{", "not JSON"),
    ("text", "[1]", "must be a JSON object"),
    ("text", '{"body": "x"}', "'text' is missing"),
    ("text", '{"text": 3}', "must be a string"),
    ("prompt_completion", '{"prompt": "x"}', "'completion' is missing"),
    ("chat", '{"messages": []}', "must be a list of messages"),
    ("chat", '{"messages": [{"role": "user"}]}', "message 0"),
    ("labelled", '{"text": "a", "label": [1]}', "must be a string or an integer"),
]


@pytest.mark.parametrize("data_format", GOOD)
def test_good_rows_pass(tmp_path: Path, data_format: str) -> None:
    text = json.dumps(GOOD[data_format]) + "\n"
    (tmp_path / "d.jsonl").write_text(text * 3 + "\n")
    assert _check(tmp_path, "d.jsonl", data_format=data_format) == []


@pytest.mark.parametrize(("data_format", "line", "words"), BAD)
def test_a_bad_row_is_named_by_its_line(
    tmp_path: Path, data_format: str, line: str, words: str
) -> None:
    good = json.dumps(GOOD[data_format])
    (tmp_path / "d.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    [(message, number)] = _check(tmp_path, "d.jsonl", data_format=data_format)
    assert number == 3
    assert "d.jsonl, line 3" in message
    assert words in message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert _check(tmp_path, "d.jsonl")[0][1] == 2
    (tmp_path / "d.txt").write_bytes(b"a\nb\n\xff\n")
    assert _check(tmp_path, "d.txt", source="text")[0][1] == 3
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one.txt").write_text("fine\n")
    (folder / "two.txt").write_bytes(b"\xff")
    [(message, number)] = _check(tmp_path, "folder", source="text")
    assert (number, "two.txt" in message) == (1, True)


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n\n")
    assert "no rows" in _check(tmp_path, "d.jsonl")[0][0]
    (tmp_path / "d.txt").write_text("  \n")
    assert "no text" in _check(tmp_path, "d.txt", source="text")[0][0]
    (tmp_path / "folder").mkdir()
    assert "no .txt file" in _check(tmp_path, "folder", source="text")[0][0]


def test_only_the_first_part_is_read(tmp_path: Path) -> None:
    row = '{"text": "a"}\n'
    (tmp_path / "d.jsonl").write_text(row * 100 + "{\n")
    assert _check(tmp_path, "d.jsonl", limit=len(row) * 100 + 1) == []
    assert _check(tmp_path, "d.jsonl", limit=len(row) * 100 + 2)[0][1] == 101


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.jsonl", "link/passwd", "a/../../x"])
def test_a_path_outside_the_roots_is_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("/etc")
    [(message, _)] = _check(root, path)
    assert "outside the allowed roots" in message


def test_every_part_of_a_spec_with_a_path_is_checked(tmp_path: Path) -> None:
    spec = _spec("/outside/d") | {
        "model": {"source": "path", "path": "/outside/m"},
        "tokenizer": {"source": "path", "path": "/outside/t"},
    }
    errors = check_files(spec, [tmp_path], [], 0)
    assert [e.pointer for e in errors] == ["/model/path", "/tokenizer/path", "/data/path"]
    assert "allows no paths" in check_files(spec, [], [], 0)[0].message


def test_what_only_a_node_has_is_left_to_the_node(tmp_path: Path) -> None:
    assert _check(tmp_path, "not-here.jsonl") == []
    assert check_files(_spec("/scratch/d.jsonl"), [tmp_path], ["/scratch"], 0) == []
    assert check_files(_spec("/scratch/../etc/x"), [tmp_path], ["/scratch"], 0)
    assert check_files(_spec("/scratchy/x"), [tmp_path], ["/scratch"], 0)


async def test_a_broken_line_over_http(service: Any, spec: Any) -> None:
    user = await service.user()
    (service.folder / "shared" / "d.jsonl").write_text('{"text": "a"}\nnot json\n')
    spec["data"] = {"source": "jsonl", "path": "d.jsonl"}
    answer = await user.post("/jobs", json=spec)
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert (error["pointer"], error["line"]) == ("/data/path", 2)
    spec["data"]["path"] = "/etc/passwd"
    answer = await user.post("/jobs", json=spec)
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/data/path"]
