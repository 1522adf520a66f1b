"""Reading a submitted document: bytes, text or a mapping, checked and bounded before anything else.

Nothing here knows the spec's fields. What comes out holds only plain JSON values, so that all later
code may recurse, hash, print and store them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fp8core.spec.problems import MOST_PROBLEMS, Problem, SpecInvalid, pointer_of

LARGEST_DOCUMENT = 1024 * 1024
DEEPEST_VALUE = 32
MOST_VALUES = 50_000
LONGEST_STRING = 65_536
LONGEST_KEY = 256
LARGEST_INTEGER = 2**63 - 1


def read_document(
    document: Mapping[str, Any] | str | bytes,
) -> tuple[dict[str, Any], list[Problem]]:
    """The document as plain JSON values, and what is wrong with single values of it.

    A refused value is replaced by null, so that the rest can still be checked. Raises `SpecInvalid`
    for a document that cannot be read at all: not UTF-8, not JSON, not an object, too large.
    """
    if isinstance(document, str | bytes | bytearray | memoryview):
        if len(document) > LARGEST_DOCUMENT:
            raise _unreadable(
                f"the spec is larger than {LARGEST_DOCUMENT // 1024} KiB; put data into files",
                "too_large",
            )
        document = decode_json(document, "the spec")
    if not isinstance(document, Mapping):
        raise _unreadable(f"a spec is a JSON object, not {kind_of(document)}", "wrong_type")
    reader = _Reader()
    return reader.plain(document, ()), reader.problems


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words: "a list", "the number 3", "the text 'abc'"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {shortened(repr(value))}"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    return f"a value of type {type(value).__name__}"


def quoted(text: str) -> str:
    """The text in double quotes, escaped, and shortened for use in a message."""
    return f'"{shortened(json.dumps(text[:200])[1:-1])}"'


def shortened(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _unreadable(message: str, code: str) -> SpecInvalid:
    return SpecInvalid([Problem("", message, code)])


class _Object(dict[str, Any]):
    """A parsed JSON object that remembers which of its keys came twice."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    parsed = _Object(pairs)
    if len(parsed) < len(pairs):
        seen: set[str] = set()
        repeated = {key for key, _ in pairs if key in seen or seen.add(key)}  # type: ignore[func-returns-value]
        parsed.repeated = tuple(key for key in parsed if key in repeated)
    return parsed


def _integer(digits: str) -> int:
    # int() of thousands of digits is quadratic, and beyond 4300 an error; the first 25 digits are
    # as much too large.
    return int(digits[:25])


def decode_json(document: str | bytes | bytearray | memoryview, what: str) -> Any:
    """The value of a JSON text, in which `faults_of` finds what JSON itself leaves open.

    `what` names the text in messages. Raises `SpecInvalid` where it is empty, not UTF-8, or no
    JSON.
    """
    if not isinstance(document, str):
        try:
            document = bytes(document).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _unreadable(
                f"{what} is not UTF-8: byte {error.start} cannot be decoded", "malformed"
            ) from None
    if not document.strip():
        raise _unreadable(f"{what} is empty; JSON was expected", "malformed")
    try:
        return json.loads(document, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise _unreadable(
            f"{what} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
            "malformed",
        ) from None
    except RecursionError:
        raise _unreadable(
            f"{what} is nested deeper than {DEEPEST_VALUE} levels", "too_deep"
        ) from None


def faults_of(value: Any, *, texts: bool = False) -> list[Problem]:
    """Keys given more than once and numbers that no field can hold, in a value of `decode_json`.

    With `texts` also texts, keys among them, that are no Unicode or hold U+0000.
    """
    found: list[Problem] = []
    _find_faults(value, (), found)
    if texts:
        _find_flaws(value, (), found)
    return found[:MOST_PROBLEMS]


def _find_flaws(value: Any, path: tuple[str | int, ...], found: list[Problem]) -> None:
    if isinstance(value, str):
        if (flaw := _flaw_of_text(value)) is not None:
            found.append(Problem(pointer_of(path), flaw, "text"))
    elif isinstance(value, dict):
        for key, item in value.items():
            if (flaw := _flaw_of_text(key)) is not None:
                found.append(Problem(pointer_of(path), f"the key {quoted(key)} {flaw}", "text"))
            _find_flaws(item, (*path, key), found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find_flaws(item, (*path, index), found)


def _find_faults(value: Any, path: tuple[str | int, ...], found: list[Problem]) -> None:
    if isinstance(value, dict):
        for key in value.repeated if isinstance(value, _Object) else ():
            found.append(Problem(pointer_of((*path, key)), _REPEATED, "duplicate_key"))
        for key, item in value.items():
            if isinstance(item, _COMPOUND):
                _find_faults(item, (*path, key), found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, _COMPOUND):
                _find_faults(item, (*path, index), found)
    elif isinstance(value, int):
        if abs(value) > LARGEST_INTEGER:
            found.append(Problem(pointer_of(path), _TOO_LARGE, "out_of_range"))
    elif isinstance(value, float) and not math.isfinite(value):
        found.append(Problem(pointer_of(path), _NOT_FINITE, "not_finite"))


_COMPOUND = (dict, list, int, float)
_REPEATED = "is given more than once; keep one"
_TOO_LARGE = f"is too large a number; whole numbers go to {LARGEST_INTEGER}"
_NOT_FINITE = "must be a finite number; NaN, Infinity and 1e999 are none"


class _Reader:
    """Copies a document into plain JSON values and notes the problems of single values."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._values = 0

    def plain(self, value: Any, path: tuple[str | int, ...]) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise _unreadable(f"the spec has more than {MOST_VALUES} values", "too_large")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._string(value, path)
        if isinstance(value, int):
            return self._integer(int(value), path)
        if isinstance(value, float):
            return self._float(float(value), path)
        if len(path) >= DEEPEST_VALUE and isinstance(value, Mapping | list | tuple):
            return self._refuse(path, f"is nested deeper than {DEEPEST_VALUE} levels", "too_deep")
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            return [self.plain(item, (*path, index)) for index, item in enumerate(value)]
        return self._refuse(path, f"must be a JSON value, not {kind_of(value)}", "wrong_type")

    def _refuse(self, path: tuple[str | int, ...], message: str, code: str) -> Any:
        """Notes a problem; what it returns stands in for the value."""
        self.problems.append(Problem(pointer_of(path), message, code))
        if len(self.problems) >= MOST_PROBLEMS:
            raise SpecInvalid(self.problems)
        return None

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        copy: dict[str, Any] = {}
        for key, item in value.items():
            if type(key) is str and _is_plain(key):
                # A short path for what nearly all members are.
                kind = type(item)
                if item is None or kind is bool or (kind is str and _is_plain(item)):
                    self._values += 1
                    copy[key] = item
                else:
                    copy[key] = self.plain(item, (*path, key))
            elif not isinstance(key, str):
                self._refuse(path, f"keys must be text; one is {kind_of(key)}", "wrong_type")
            elif len(key) > LONGEST_KEY:
                self._refuse(
                    path,
                    f"the key {quoted(key)} exceeds {LONGEST_KEY} characters",
                    "too_long",
                )
            elif flaw := _flaw_of_text(key):
                self._refuse(path, f"the key {quoted(key)} {flaw}", "bad_format")
            else:
                copy[str(key)] = self.plain(item, (*path, key))
        for key in value.repeated if isinstance(value, _Object) else ():
            self._refuse((*path, key), _REPEATED, "duplicate_key")
        return copy

    def _string(self, value: str, path: tuple[str | int, ...]) -> Any:
        if len(value) > LONGEST_STRING:
            return self._refuse(path, f"is longer than {LONGEST_STRING} characters", "too_long")
        if flaw := _flaw_of_text(value):
            return self._refuse(path, flaw, "bad_format")
        return str(value)

    def _integer(self, value: int, path: tuple[str | int, ...]) -> Any:
        if abs(value) > LARGEST_INTEGER:
            return self._refuse(path, _TOO_LARGE, "out_of_range")
        return value

    def _float(self, value: float, path: tuple[str | int, ...]) -> Any:
        if math.isfinite(value):
            return value
        return self._refuse(path, _NOT_FINITE, "not_finite")


def _is_plain(text: str) -> bool:
    return len(text) <= LONGEST_KEY and text.isascii() and text.isprintable()


def _flaw_of_text(text: str) -> str | None:
    if "\x00" in text:
        return "contains the character U+0000, which cannot be stored"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "contains half of a surrogate pair, which is no character"
    return None
