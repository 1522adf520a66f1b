"""Plain text: documents, pieces, broken files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.data.text_files import MemoryTextSource, TextFileSource, block_bytes, cut
from fp8core.errors import DataInvalid


def open_text(path: Path, separator: str | None = None) -> TextFileSource:
    return TextFileSource([(path, path.name)], separator)


def texts(source: TextFileSource | MemoryTextSource) -> list[str]:
    return [record.fields["text"] for record in source.records(range(len(source)))]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab é\n𝄞", min_size=1, max_size=300), block=st.integers(4, 60))
def test_pieces_join_to_the_document_and_are_whole_characters(text: str, block: int) -> None:
    data = text.encode()
    ends = list(cut(0, len(data), block, lambda at, n: data[at : at + n]))
    assert ends == sorted(set(ends))
    pieces = [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(len(piece) <= 2 * block + 4 for piece in pieces)


def test_a_single_document_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line number {index}\n" for index in range(40_000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(lines))
    source = open_text(path)
    records = source.records(range(len(source)))
    assert "".join(record.fields["text"] for record in records) == "".join(lines)
    assert all(record.fields["text"].endswith("\n") for record in records)
    assert [r.begins for r in records] == [True] + [False] * (len(records) - 1)
    assert [r.ends for r in records] == [False] * (len(records) - 1) + [True]
    assert len(records) > 100
    assert block_bytes(path.stat().st_size) == 4096
    first = int(records[7].fields["text"].split("\n")[0].split()[-1])
    assert source.where(7) == f"book.txt, line {first + 1}"


def test_separator_is_a_line_or_literal_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("---\none\n-----\n---\r\ntwo\n\n---\n   \n---\nthree\n---")
    assert texts(open_text(path, "---")) == ["one\n-----\n", "two\n\n", "three\n"]
    assert open_text(path, "---").skipped == 1
    path.write_text("one\ntwo\n\n\nthree\n\nfour")
    assert texts(open_text(path, "\n\n")) == ["one\ntwo", "\nthree", "four"]
    path.write_text("a---b\n---\nc")
    assert texts(open_text(path, "---")) == ["a---b\n", "c"]


def test_separators_are_found_across_reads(tmp_path: Path) -> None:
    # The second separator lies across the border of one mebibyte.
    filler = "x" * 1023 + "\n"
    head = filler * 1023 + "y" * 1015 + "\n"
    path = tmp_path / "a.txt"
    path.write_text(head + "<document>\n" + "second\n<document>\nthird\n")
    assert len(head) < 1 << 20 < len(head) + 10
    source = open_text(path, "<document>")
    records = source.records(range(len(source)))
    documents, text = [], ""
    for record in records:
        text += record.fields["text"]
        if record.ends:
            documents.append(text)
            text = ""
    assert documents == [head, "second\n", "third\n"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n ", "the file has no text"),
        (b"fine\nfine\nbad \xff\n", "a.txt, line 3: not UTF-8 (byte 15 of the file)"),
        (b"cut off \xe2\x82", "a.txt, line 1: not UTF-8 (byte 9 of the file)"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataInvalid) as raised:
        open_text(path)
    assert message in raised.value.message
    assert raised.value.pointer == "/data"


def test_bad_byte_behind_the_first_read_is_located(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    # A character lies across the border of the first mebibyte, the bad byte behind it.
    path.write_bytes(b"x" * ((1 << 20) - 1) + "é\n".encode() + b"\xfe")
    with pytest.raises(DataInvalid, match=rf"line 2: not UTF-8 \(byte {(1 << 20) + 3} of"):
        open_text(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert "".join(texts(open_text(path))) == "hello"


def test_change_of_a_file_under_training_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text\n" * 10)
    source = open_text(path)
    path.write_text("so")
    with pytest.raises(DataInvalid, match="changed since training began"):
        source.records([len(source) - 1])
    path.unlink()
    with pytest.raises(DataInvalid, match=r"a\.txt: cannot be read: No such file"):
        source.records([0])


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two")
    before = open_text(path).fingerprint
    assert open_text(path).fingerprint == before
    path.write_text("one twо")  # the last letter is Cyrillic
    assert open_text(path).fingerprint != before


def test_texts_in_memory_are_cut_the_same_way() -> None:
    document = "word " * 4000
    source = MemoryTextSource([("first", "short"), ("second", document)])
    records = source.records(range(len(source)))
    assert records[0].fields["text"] == "short"
    assert "".join(record.fields["text"] for record in records[1:]) == document
    assert len(records) > 4
    assert source.where(1) == "second, byte 1"
