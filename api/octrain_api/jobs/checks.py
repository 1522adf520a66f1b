"""What the API can know of a spec's files before it takes the job: their place, and shared data.

Paths must lie below an allowed root, symlinks resolved. A data file that this machine can read is
checked up to a bound; what only a node sees is checked there, when it claims the job.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from octrain_api.problems import ProblemError
from octrain_api.settings import StorageSettings

_PATH_FIELDS = (("model", "path"), ("tokenizer", "path"), ("data", "path"))
_MAX_TEXT_FILES = 10_000


def names_files(spec: dict[str, Any]) -> bool:
    """Whether a resolved spec names any file or folder."""
    parts = (spec[part] for part, _ in _PATH_FIELDS)
    return any(isinstance(part, dict) and part.get("path") is not None for part in parts)


def check_files(
    spec: dict[str, Any],
    roots: Sequence[Path],
    node_roots: Sequence[str],
    byte_limit: int,
) -> list[ProblemError]:
    """Everything wrong with the files of a resolved spec. Blocks on the disk.

    `roots` are this server's (resolved), `node_roots` those that nodes registered; reads at most
    `byte_limit` bytes of data.
    """
    problems = []
    data_path = None
    for part, field in _PATH_FIELDS:
        path = spec[part].get(field) if isinstance(spec.get(part), dict) else None
        if path is None:
            continue
        found, problem = _place(path, roots, node_roots)
        if problem is not None:
            problems.append(ProblemError(pointer=f"/{part}/{field}", message=problem, code="path"))
        elif part == "data":
            data_path = found
    if data_path is not None and not problems:
        problems += _check_data(spec["data"], data_path, byte_limit)
    return problems


def check_secrets(spec: dict[str, Any], allows: Callable[[str], bool]) -> list[ProblemError]:
    """Secrets that the spec names and its owner may not use: unknown ones look the same."""
    return [
        ProblemError(
            pointer=f"/secrets/{variable}",
            message=f"there is no secret {name!r} for this owner; the operator sets which there "
            "are (OCTRAIN_JOB_SECRETS)",
            code="unknown_secret",
        )
        for variable, name in spec.get("secrets", {}).items()
        if not allows(name)
    ]


def own_root_texts(storage: StorageSettings, owner: str) -> list[str] | None:
    """The owner's own roots as nodes are told them; None for one who has everybody's."""
    own = storage.own_roots(owner)
    return [str(root) for root in own] if own is not None else None


def narrowed(node_roots: Sequence[str], own: Sequence[str] | None) -> list[str]:
    """The nodes' roots as far as an owner with roots of their own may read them.

    By the writing of the paths: each node follows its own links when it claims the job.
    """
    if own is None:
        return list(node_roots)
    found = []
    for node_root in map(os.path.normpath, node_roots):
        for root in map(os.path.normpath, own):
            if (root + os.sep).startswith(node_root.rstrip(os.sep) + os.sep):
                found.append(root)
            elif (node_root + os.sep).startswith(root.rstrip(os.sep) + os.sep):
                found.append(node_root)
    return list(dict.fromkeys(found))


def _place(
    path: str, roots: Sequence[Path], node_roots: Sequence[str]
) -> tuple[Path | None, str | None]:
    """The readable file or folder below this server's roots, if any; or why the path is refused."""
    if "\x00" in path:
        return None, "a path cannot hold a NUL character"
    try:
        return _look_up(path, roots, node_roots)
    except (OSError, RuntimeError, ValueError):
        # Too long a name, a loop of links, half a surrogate pair.
        return None, f"{path!r} is no path that a file can have"


def _look_up(
    path: str, roots: Sequence[Path], node_roots: Sequence[str]
) -> tuple[Path | None, str | None]:
    if not roots and not node_roots:
        return None, (
            "this server allows no paths: its operator sets OCTRAIN_ROOTS to the folders that "
            "specs may name"
        )
    allowed = False
    for root in roots:
        target = (root / path).resolve()
        if target.is_relative_to(root):
            allowed = True
            if target.exists() and os.access(target, os.R_OK):
                return target, None
    if allowed:
        return None, None
    own = {str(root) for root in roots}
    for text in node_roots:
        if os.path.normpath(text) in own:
            continue  # the same folder as seen from here: its links have just been followed
        # Of another machine's disk only the writing of the path can be judged; the node judges
        # where its links lead.
        target_text = os.path.normpath(os.path.join(text, path))
        if target_text == os.path.normpath(text) or target_text.startswith(
            os.path.normpath(text) + os.sep
        ):
            return None, None
    return None, f"{path!r} lies outside the allowed roots"


def _check_data(data: dict[str, Any], path: Path, byte_limit: int) -> list[ProblemError]:
    try:
        if data["source"] == "jsonl" and path.is_file():
            problem = _check_jsonl(data, path, byte_limit)
        elif data["source"] == "text":
            problem = _check_text(path, byte_limit)
        else:
            problem = None
    except OSError as error:
        problem = _problem(f"{path.name}: cannot be read: {error.strerror}", None)
    return [problem] if problem is not None else []


def _problem(message: str, line: int | None) -> ProblemError:
    return ProblemError(pointer="/data/path", message=message, code="data_invalid", line=line)


def _lines(path: Path, byte_limit: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines within the first `byte_limit` bytes, numbered from 1."""
    left = byte_limit
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            left -= len(line)
            if left < 0:
                return
            yield number, line


def _check_jsonl(data: dict[str, Any], path: Path, byte_limit: int) -> ProblemError | None:
    empty = True
    for number, raw in _lines(path, byte_limit):
        if not raw.strip():
            continue
        empty = False
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError:
            return _problem(f"{path.name}, line {number}: not UTF-8", number)
        except (ValueError, RecursionError) as error:
            return _problem(f"{path.name}, line {number}: not JSON: {error}", number)
        wrong = check_row(data, row)
        if wrong is not None:
            return _problem(f"{path.name}, line {number}: {wrong}", number)
    if empty and path.stat().st_size <= byte_limit:
        return _problem(f"{path.name}: holds no rows", None)
    return None


def check_row(data: dict[str, Any], row: Any) -> str | None:
    """What is wrong with one row of this format, or None."""
    if not isinstance(row, dict):
        return "a row must be a JSON object"
    columns = data["columns"]
    data_format = data["format"]
    names = {
        "text": ("text",),
        "prompt_completion": ("prompt", "completion"),
        "chat": ("messages",),
        "labelled": ("text", "label"),
    }[data_format]
    for name in names:
        column = columns[name]
        if column not in row:
            return f"the column {column!r} is missing"
        value = row[column]
        if name == "messages":
            wrong = _check_messages(column, value)
            if wrong is not None:
                return wrong
        elif name == "label":
            if not isinstance(value, str | int):
                return f"the column {column!r} must be a string or an integer"
        elif not isinstance(value, str):
            return f"the column {column!r} must be a string"
    return None


def _check_messages(column: str, value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"the column {column!r} must be a list of messages"
    for index, message in enumerate(value):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            return f"message {index} of {column!r} needs 'role' and 'content', both strings"
    return None


def _check_text(path: Path, byte_limit: int) -> ProblemError | None:
    files = sorted(path.rglob("*.txt"))[:_MAX_TEXT_FILES] if path.is_dir() else [path]
    if not files:
        return _problem(f"{path.name}: the folder holds no .txt file", None)
    left = byte_limit
    empty = True
    for file in files:
        if file.stat().st_size > left:
            empty = False
        for number, line in _lines(file, left):
            left -= len(line)
            empty = empty and not line.strip()
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return _problem(f"{file.name}, line {number}: not UTF-8", number)
    return _problem(f"{path.name}: holds no text", None) if empty else None
