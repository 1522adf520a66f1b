"""What is wrong with a record, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.data.dataset import open_corpus
from fp8core.data.sources import open_source
from fp8core.errors import DataInvalid

Spec = Callable[..., Any]


def check(make_spec: Spec, path: Path, format: str, **options: Any) -> Any:
    data = {"source": "jsonl", "path": str(path), "format": format} | options
    task = "sequence_classification" if format == "labelled" else "causal_lm"
    return open_source(make_spec(data=data, task=task).data)


GOOD = {
    "text": {"text": "hello"},
    "prompt_completion": {"prompt": "2+2=", "completion": "4"},
    "chat": {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "y"}]
    },
    "labelled": {"text": "hello", "label": "x"},
}


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("format", "line", "message"),
    [
        ("text", '{"text": "a"', "not valid JSON"),
        ("text", "{'text': 'a'}", "not valid JSON"),
        ("text", '["a"]', "expected an object, found a list"),
        ("text", '"a"', "expected an object, found a string"),
        ("text", '{"txt": "a"}', "no field 'text' (fields: 'txt')"),
        ("text", "{}", "no field 'text' (fields: none)"),
        ("text", '{"text": 5}', "'text' must be a string, found a number"),
        ("text", '{"text": null}', "'text' must be a string, found null"),
        ("text", '{"text": "\\ud800"}', "half of a surrogate pair at character 1"),
        ("text", "[" * 100_000, "not acceptable JSON"),
        ("text", '{"text": ' + "1" * 10_000 + "}", "not acceptable JSON"),
        ("prompt_completion", '{"prompt": "a"}', "no field 'completion'"),
        ("prompt_completion", '{"prompt": "a", "completion": ""}', "'completion' is empty"),
        ("labelled", '{"text": "a", "label": 1.5}', "must be a string or a whole number"),
        ("labelled", '{"text": "a", "label": true}', "found true or false"),
        ("labelled", '{"text": "a", "label": ["x"]}', "found a list"),
        ("labelled", '{"text": "a"}', "no field 'label'"),
        ("chat", '{"messages": "hi"}', "must be a list of messages, found a string"),
        ("chat", '{"messages": []}', "found an empty list"),
        ("chat", json.dumps(chat("hi")), "messages[0] must be an object"),
        ("chat", json.dumps(chat({"role": "bot", "content": "x"})), "messages[0].role must be"),
        ("chat", json.dumps(chat({"role": ["user"], "content": "x"})), "messages[0].role must be"),
        ("chat", json.dumps(chat({"content": "x"})), "not None"),
        ("chat", json.dumps(chat({"role": "user"})), "messages[0] has no 'content'"),
        ("chat", json.dumps(chat({"role": "user", "content": 1})), "content must be a string"),
        ("chat", json.dumps(chat({"role": "user", "content": "x"})), "no message of the assistant"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, make_spec: Spec, format: str, line: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps(GOOD[format])
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(DataInvalid) as raised:
        check(make_spec, path, format)
    # The blank line counts: it is the third line an editor shows.
    assert raised.value.message.startswith(f"{path}, line 3: ")
    assert message in raised.value.message
    assert raised.value.pointer is not None
    assert raised.value.pointer.startswith("/data")


def test_a_missing_column_points_at_its_setting(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"body": "a"}\n')
    with pytest.raises(DataInvalid) as raised:
        check(make_spec, path, "text")
    assert raised.value.pointer == "/data/columns/text"
    opened = check(make_spec, path, "text", columns={"text": "body"})
    assert opened.source.records([0])[0].fields == {"text": "a"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file has no records"),
        (b'{"text": "\xff"}\n', "line 1: not UTF-8 (byte 11 of the line)"),
    ],
)
def test_files_without_records_and_wrong_encodings(
    tmp_path: Path, make_spec: Spec, data: bytes, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataInvalid) as raised:
        check(make_spec, path, "text")
    assert message in raised.value.message


def test_lines_are_read_at_random(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"é\u2028 {index}"}, ensure_ascii=False) for index in range(500)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    source = check(make_spec, path, "text").source
    assert len(source) == 500
    wanted = [499, 0, 250, 7]
    found = [record.fields["text"] for record in source.records(wanted)]
    assert found == [f"é\u2028 {index}" for index in wanted]
    assert source.where(250) == f"{path}, line 251"


def test_a_line_that_changes_under_training_is_noticed(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    source = check(make_spec, path, "text").source
    path.write_text('{"text": "abcdef"}\n{"text": "b"}\n')
    with pytest.raises(DataInvalid, match="line 1: the line changed"):
        source.records([1])
    # Still a record to JSON, but none that was checked.
    path.write_text('{"text": "a"}\n{"text": 123}\n')
    with pytest.raises(DataInvalid, match="line 2: the line changed"):
        source.records([1])
    path.unlink()
    with pytest.raises(DataInvalid, match=r"data\.jsonl: cannot be read: No such file"):
        source.records([1])


def test_index_takes_eight_bytes_a_line(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' * 1000)
    source = check(make_spec, path, "text").source
    assert source._starts.itemsize * len(source._starts) == 8000


def test_a_message_shows_only_so_much_of_the_data(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "x" * 10**6, "content": ""}]}) + "\n")
    with pytest.raises(DataInvalid, match=r"line 1: messages\[0\]\.role must be one of") as raised:
        open_source(make_spec(data={"source": "jsonl", "path": str(path), "format": "chat"}).data)
    assert len(raised.value.message) < 2000


def test_many_labels_are_compared_in_good_time(
    make_spec: Spec, write_jsonl: Callable[..., Path]
) -> None:
    rows = [{"text": "t", "label": f"label {number}"} for number in range(60_000)]
    data = {"source": "jsonl", "path": str(write_jsonl(rows)), "format": "labelled"}
    spec = make_spec(data=data, task="sequence_classification", evaluation={"fraction": 0.0})
    classes = open_corpus(spec).class_labels  # each compared with each would take minutes
    assert classes is not None
    assert len(classes) == 60_000


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_place_in_a_file_that_has_gone_is_its_name(
    tmp_path: Path, make_spec: Spec, kind: str
) -> None:
    path = tmp_path / "data"
    path.write_text('{"text": "a"}\n')
    source = open_source(make_spec(data={"source": kind, "path": str(path)}).data).source
    path.unlink()
    assert source.where(0) == str(path)


def test_a_field_that_is_given_twice_is_refused(tmp_path: Path, make_spec: Spec) -> None:
    path = tmp_path / "data.jsonl"
    fine = [
        r'{"text": "a \"text\": \"text\""}',
        '{"text": "text", "other": {"text": 1, "more": [{"text": 2}]}}',
        '{"text": "a", "other": 1, "other": 2}',
    ]
    path.write_text("".join(line + "\n" for line in fine))
    assert len(check(make_spec, path, "text").source) == 3
    path.write_text(fine[0] + '\n{"text": "first", "x": 1, "text": "last"}\n')
    with pytest.raises(DataInvalid, match="line 2: 'text' is given more than once"):
        check(make_spec, path, "text")
