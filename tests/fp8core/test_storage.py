"""The artifact store: whole files, checked keys, on disk and in an object store."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

from fp8core.durable import told_when_full
from fp8core.errors import StorageFull
from fp8core.storage import ArtifactStore


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    # "memory" is fsspec's own object store: the code path of s3:// without a server.
    if request.param == "file":
        return ArtifactStore(f"file://{tmp_path}/a%20store")
    return ArtifactStore(f"memory://{uuid.uuid4().hex}/prefix")


def test_a_file_goes_in_and_comes_out_with_its_sha256(store: ArtifactStore, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    data = os.urandom(3_000_000)
    source.write_bytes(data)
    put = store.put_file(source, "jobs/job_1/attempts/1/model.safetensors")
    assert put.sha256 == hashlib.sha256(data).hexdigest()
    assert put.size == store.size(put.key) == len(data)
    got = store.get(put.key, tmp_path / "copy", sha256=put.sha256)
    assert (tmp_path / "copy").read_bytes() == data
    assert got.sha256 == put.sha256
    with store.open(put.key) as reader:
        reader.seek(1_000_000)
        assert reader.read(10) == data[1_000_000:1_000_010]


def test_a_wrong_sha256_leaves_no_file_behind(store: ArtifactStore, tmp_path: Path) -> None:
    store.put_bytes(b"content", "a")
    target = tmp_path / "out" / "copy"
    target.parent.mkdir()
    with pytest.raises(ValueError, match="sha256"):
        store.get("a", target, sha256="0" * 64)
    assert list(target.parent.iterdir()) == []


def test_folders_lists_and_deletion(store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights").write_bytes(b"1234")
    put = store.put_folder(folder, "jobs/1/model")
    assert [file.key for file in put] == ["jobs/1/model/config.json", "jobs/1/model/sub/weights"]
    store.put_bytes(b"x", "jobs/10/model")
    assert [(item.key, item.size) for item in store.list("jobs/1")] == [
        ("jobs/1/model/config.json", 2),
        ("jobs/1/model/sub/weights", 4),
    ]
    assert len(store.list()) == 3
    assert store.list("nothing/here") == []
    assert store.exists("jobs/1/model")
    store.delete("jobs/1")
    assert not store.exists("jobs/1/model/config.json")
    assert store.exists("jobs/10/model")
    store.delete("jobs/1")  # nothing there is no error


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a/./b", "a\\b", "a\0b", "a/"]
)
def test_a_key_that_climbs_out_is_refused(store: ArtifactStore, key: str) -> None:
    with pytest.raises(ValueError, match="is not a key"):
        store.put_bytes(b"x", key)
    with pytest.raises(ValueError, match="is not a key"):
        store.open(key)


def test_links_are_not_followed_into_the_store(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "fine").write_text("x")
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="not a regular file"):
        store.put_folder(folder, "a")
    assert store.list() == []


class BreaksHalfway(io.RawIOBase):
    def __init__(self) -> None:
        self.calls = 0

    def read(self, size: int = -1) -> bytes:
        self.calls += 1
        if self.calls > 2:
            raise OSError("the source went away")
        return b"half"


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    store.put_bytes(b"old", "a/b")
    with pytest.raises(OSError, match="went away"):
        store._put(BreaksHalfway(), "a/b")
    with store.open("a/b") as reader:
        assert reader.read() == b"old"
    assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("relative/path", "absolute path"),
        ("file://srv/octrain", "three slashes"),
        ("file:///srv/a#b", "%23"),
        ("file:///srv/a?b", "%3F"),
        ("http://host/x", "cannot hold artifacts"),
        ("sftp://host/x", "cannot hold artifacts"),
    ],
)
def test_urls_that_cannot_hold_artifacts_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ArtifactStore(url)


def test_a_file_url_names_any_folder(tmp_path: Path) -> None:
    for name in ("a#b", "a b"):
        url = f"file://localhost{tmp_path}/{quote(name)}"
        ArtifactStore(url).put_bytes(b"x", "key")
        assert (tmp_path / name / "key").read_bytes() == b"x"


def test_what_is_not_there_is_reported(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.open("absent")
    with pytest.raises(FileNotFoundError):
        store.get("absent", tmp_path / "x")


def test_unfinished_files_are_listed_on_request(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path.as_uri())
    store.put_bytes(b"x", "a/b")
    (tmp_path / "a" / ".partial-0123").write_bytes(b"x")
    assert [one.key for one in store.list("a")] == ["a/b"]
    assert [one.key for one in store.list("a", unfinished=True)] == ["a/.partial-0123", "a/b"]


def test_a_full_disk_is_told_of_a_tree_too(tmp_path: Path) -> None:
    """``shutil.copytree`` raises an OSError without a number."""

    def no_room(_source: str, _target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def not_allowed(_source: str, _target: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"x")
    with pytest.raises(StorageFull, match="No space left"), told_when_full(tmp_path):
        shutil.copytree(tmp_path / "tree", tmp_path / "one", copy_function=no_room)
    with pytest.raises(shutil.Error), told_when_full(tmp_path):
        shutil.copytree(tmp_path / "tree", tmp_path / "two", copy_function=not_allowed)
