"""Which files a spec means, and which it may not mean."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.data.sources import open_source
from fp8core.errors import DataInvalid, SpecRefused

Spec = Callable[..., Any]


def all_texts(source: Any) -> list[str]:
    return [record.fields["text"] for record in source.records(range(len(source)))]


def test_a_folder_of_text_files_is_read_in_the_order_of_names(
    tmp_path: Path, make_spec: Spec
) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    for name, text in [("b/x.txt", "second"), ("a.txt", "first"), ("c.txt", ""), ("d.md", "no")]:
        (folder / name).write_text(text)
    data = make_spec(data={"source": "text", "path": "corpus"}).data
    source = open_source(data, base_folder=tmp_path).source
    assert all_texts(source) == ["first", "second"]
    assert source.skipped == 1
    assert source.where(1) == "corpus/b/x.txt, line 1"


def test_folders_of_jsonl_files(tmp_path: Path, make_spec: Spec) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (folder / "2.jsonl").write_text('{"text": "c"}\n')
    source = open_source(make_spec(data={"source": "jsonl", "path": str(folder)}).data).source
    assert all_texts(source) == ["a", "b", "c"]
    assert source.where(2) == f"{folder}/2.jsonl, line 1"


def test_empty_folders_and_missing_files(tmp_path: Path, make_spec: Spec) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataInvalid, match=r"empty: the folder holds no \.txt file") as raised:
        open_source(make_spec(data={"source": "text", "path": str(tmp_path / "empty")}).data)
    assert raised.value.pointer == "/data/path"
    with pytest.raises(DataInvalid, match="no such file") as raised:
        open_source(make_spec(data={"source": "jsonl", "path": str(tmp_path / "none")}).data)
    assert raised.value.pointer == "/data/path"


def test_devices_and_pipes_are_no_data(tmp_path: Path, make_spec: Spec) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataInvalid, match="neither a file nor a folder"):
        open_source(make_spec(data={"source": "text", "path": str(tmp_path / "pipe.txt")}).data)
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "a.txt").write_text("fine")
    with pytest.raises(DataInvalid, match=r"pipe\.txt: neither a file nor a folder"):
        open_source(make_spec(data={"source": "text", "path": str(folder)}).data)


def test_paths_and_links_stay_below_the_roots(tmp_path: Path, make_spec: Spec) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (root / "folder" / "a.txt").write_text("fine")
    (root / "link.txt").symlink_to(secret)

    def open_below(path: str) -> Any:
        data = make_spec(data={"source": "text", "path": path}).data
        return open_source(data, roots=[root]).source

    assert all_texts(open_below("folder")) == ["fine"]
    for path in (str(secret), "../secret.txt", "link.txt"):
        with pytest.raises(SpecRefused, match="outside the allowed roots"):
            open_below(path)
    # A link inside an allowed folder is no way out either.
    (root / "folder" / "z.txt").symlink_to(secret)
    with pytest.raises(SpecRefused, match="outside the allowed roots"):
        open_below("folder")


def test_uploads_are_files_of_one_kind(tmp_path: Path, make_spec: Spec) -> None:
    data = make_spec(data={"source": "upload", "dataset": "mine"}).data
    with pytest.raises(SpecRefused, match="'mine' is not on this machine"):
        open_source(data)
    folder = tmp_path / "upload"
    folder.mkdir()
    with pytest.raises(DataInvalid, match="found none of them"):
        open_source(data, upload_folder=folder)
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    source = open_source(data, upload_folder=folder).source
    assert all_texts(source) == ["a"]
    assert source.where(0) == "mine/a.jsonl, line 1"
    (folder / "b.txt").write_text("b")
    with pytest.raises(DataInvalid, match=r"found \.txt and \.jsonl"):
        open_source(data, upload_folder=folder)


def test_the_builtin_text_is_english_and_always_the_same(make_spec: Spec) -> None:
    data = make_spec(data={"source": "builtin"}).data
    first, second = open_source(data).source, open_source(data).source
    assert first.fingerprint == second.fingerprint
    text = "".join(all_texts(first))
    assert len(text) > 400_000
    assert text.count(" the ") > 3000
    # Small enough pieces for a split of two hundredths.
    assert len(first) > 150


def test_a_folder_that_cannot_be_read_is_told_and_not_left_out(
    tmp_path: Path, make_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text('{"text": "a"}\n')
    scan = os.scandir

    def refusing(path: Any) -> Any:  # for root no folder is unreadable
        if Path(path).name == "two":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    spec = make_spec(data={"source": "jsonl", "path": str(tmp_path)})
    with pytest.raises(DataInvalid, match="two: cannot be read: Permission denied") as raised:
        open_source(spec.data)
    assert raised.value.pointer == "/data/path"
