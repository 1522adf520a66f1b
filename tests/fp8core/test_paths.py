"""Paths of a spec: looked up below the roots, never leading out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8core.errors import DataInvalid, SpecRefused
from fp8core.paths import resolve_path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("first", "second", "outside", "first-but-longer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "first" / "a.txt").write_text("a")
    (tmp_path / "second" / "a.txt").write_text("shadowed")
    (tmp_path / "second" / "b.txt").write_text("b")
    (tmp_path / "outside" / "secret.txt").write_text("s")
    (tmp_path / "first-but-longer" / "c.txt").write_text("c")
    return tmp_path


def test_without_roots_a_relative_path_is_relative_to_the_base(tree: Path) -> None:
    assert resolve_path("a.txt", base=tree / "first") == (tree / "first" / "a.txt").resolve()
    assert resolve_path("../outside/secret.txt", base=tree / "first").read_text() == "s"
    assert resolve_path(str(tree / "outside" / "secret.txt"), base=tree).read_text() == "s"


def test_roots_are_searched_in_order(tree: Path) -> None:
    roots = [tree / "first", tree / "second"]
    assert resolve_path("a.txt", roots).read_text() == "a"
    assert resolve_path("b.txt", roots).read_text() == "b"
    assert resolve_path(tree / "second" / "a.txt", roots).read_text() == "shadowed"
    assert resolve_path(tree / "first", roots) == (tree / "first").resolve()


@pytest.mark.parametrize(
    "path",
    ["../outside/secret.txt", "{tree}/outside/secret.txt", "{tree}/first/../outside/secret.txt"],
)
def test_a_path_outside_is_refused_with_its_pointer(tree: Path, path: str) -> None:
    with pytest.raises(SpecRefused, match="outside the allowed roots") as refused:
        resolve_path(path.format(tree=tree), [tree / "first"], pointer="/data/path")
    assert refused.value.pointer == "/data/path"
    assert refused.value.line.startswith("/data/path: ")


def test_a_name_that_only_begins_like_a_root_is_outside(tree: Path) -> None:
    with pytest.raises(SpecRefused, match="outside the allowed roots"):
        resolve_path(tree / "first-but-longer" / "c.txt", [tree / "first"])


def test_a_link_may_lead_to_another_root_but_not_out(tree: Path) -> None:
    (tree / "first" / "out").symlink_to(tree / "outside" / "secret.txt")
    (tree / "first" / "folder").symlink_to(tree / "outside")
    (tree / "first" / "across").symlink_to(tree / "second" / "b.txt")
    roots = [tree / "first", tree / "second"]
    for path in ("out", "folder/secret.txt"):
        with pytest.raises(SpecRefused, match="outside the allowed roots"):
            resolve_path(path, roots)
    assert resolve_path("across", roots).read_text() == "b"


def test_a_root_that_is_itself_a_link_works(tree: Path) -> None:
    (tree / "link").symlink_to(tree / "first")
    assert resolve_path("a.txt", [tree / "link"]).read_text() == "a"


def test_what_exists_outside_cannot_be_told_from_what_does_not(tree: Path) -> None:
    messages = []
    for name in ("secret.txt", "absent.txt"):
        with pytest.raises(SpecRefused) as refused:
            resolve_path(f"../outside/{name}", [tree / "first"])
        messages.append(str(refused.value).replace(name, "NAME"))
    assert messages[0] == messages[1]


def test_missing_is_reported_as_the_caller_asks(tree: Path) -> None:
    with pytest.raises(DataInvalid, match="no such file") as refused:
        resolve_path("absent.txt", [tree / "first"], pointer="/data/path", missing=DataInvalid)
    assert refused.value.pointer == "/data/path"
    with pytest.raises(SpecRefused, match="no such file"):
        resolve_path("absent.txt", base=tree)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(tree: Path, path: str) -> None:
    with pytest.raises(SpecRefused, match="empty or holds a NUL"):
        resolve_path(path, [tree / "first"])


def test_a_loop_of_links_is_missing_not_a_crash(tree: Path) -> None:
    (tree / "first" / "loop").symlink_to(tree / "first" / "loop")
    with pytest.raises(SpecRefused):
        resolve_path("loop", [tree / "first"])
