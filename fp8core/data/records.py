"""What a source of documents is, and the checks that every record passes before training."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fp8core.data.order import Groups
from fp8core.errors import DataInvalid
from fp8core.spec.document import shortened

__all__ = [
    "ROLES",
    "DataFormat",
    "DocumentSource",
    "Fields",
    "Record",
    "RecordChecker",
    "check_completion",
    "check_messages",
    "invalid",
    "unreadable",
]

DataFormat = Literal["text", "prompt_completion", "chat", "labelled"]
_LONGEST_MESSAGE = 1000
ROLES = ("system", "developer", "user", "assistant", "tool")

_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
    "labelled": ("text", "label"),
}
_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One document under the names of its format: text, prompt, completion, messages, label.

    A long text may come in several records; ``begins`` and ``ends`` say whether this one holds the
    document's start and end.
    """

    fields: Mapping[str, Any]
    begins: bool = True
    ends: bool = True


class DocumentSource(Protocol):
    """Random access to documents, checked when the source was opened.

    ``fingerprint`` changes when the data does. ``groups`` is set where neighbours must be read
    together. ``skipped`` counts what held no document (blank lines, empty files).
    """

    fingerprint: str
    groups: Groups | None
    skipped: int

    def __len__(self) -> int: ...

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """The documents of these numbers, 0-based; raises ``DataInvalid`` when unreadable."""
        ...

    def where(self, number: int) -> str:
        """Where a document is, for a person: ``data.jsonl, line 3``."""
        ...


@dataclass(frozen=True)
class Fields:
    """The column of each field that a format reads."""

    format: DataFormat
    columns: Mapping[str, str]

    @classmethod
    def of(cls, format: DataFormat, columns: Any) -> Fields:
        """From the format and the spec's ``data.columns``."""
        return cls(format, {field: getattr(columns, field) for field in _FIELDS[format]})

    def record(self, row: Mapping[str, Any]) -> Record:
        return Record({field: row[column] for field, column in self.columns.items()})


class RecordChecker:
    """Checks rows one after another and notes their labels.

    ``label_codes`` holds, for the format ``labelled``, one number per row into ``label_names``
    (in order of first appearance).
    """

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.label_codes = array("i")
        self.label_names: list[str] = []
        self.integer_labels = True
        self._codes: dict[str, int] = {}

    def check(self, row: Any, where: Callable[[], str]) -> None:
        """Raises ``DataInvalid`` saying what is wrong with the row and ``where``."""
        if type(row) is not dict:
            raise invalid(where(), f"expected an object, found {_named(row)}")
        for field, column in self.fields.columns.items():
            if column not in row:
                present = ", ".join(repr(str(name)) for name in list(row)[:8]) or "none"
                raise invalid(
                    where(),
                    f"no field {column!r} (fields: {present})",
                    pointer=f"/data/columns/{field}",
                )
            value = row[column]
            if field == "label":
                self.note_label(value, where)
            elif field == "messages":
                check_messages(value, column, where)
            elif field == "completion":
                check_completion(value, column, where)
            else:
                _check_text(value, repr(column), where)

    def note_label(self, value: Any, where: Callable[[], str]) -> None:
        """Take down the label of the next row; whole numbers become their decimal digits."""
        column = self.fields.columns["label"]
        if type(value) is int:
            name = str(value)
        elif type(value) is str:
            _check_text(value, repr(column), where)
            name = value
            self.integer_labels = False
        else:
            raise invalid(
                where(), f"{column!r} must be a string or a whole number, found {_named(value)}"
            )
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.label_names)
            self.label_names.append(name)
        self.label_codes.append(code)


def check_completion(value: Any, column: str, where: Callable[[], str]) -> None:
    """A text that is not empty."""
    _check_text(value, repr(column), where)
    if not value:
        raise invalid(where(), f"{column!r} is empty: there is nothing to learn")


def check_messages(value: Any, column: str, where: Callable[[], str]) -> None:
    """A list of objects with a known role and text, at least one of them the assistant's."""
    if type(value) is not list or not value:
        found = "an empty list" if value == [] else _named(value)
        raise invalid(where(), f"{column!r} must be a list of messages, found {found}")
    spoke = False
    for index, message in enumerate(value):
        place = f"{column}[{index}]"
        if type(message) is not dict:
            raise invalid(where(), f"{place} must be an object, found {_named(message)}")
        role = message.get("role")
        if role not in ROLES:
            raise invalid(where(), f"{place}.role must be one of {', '.join(ROLES)}, not {role!r}")
        if "content" not in message:
            raise invalid(where(), f"{place} has no 'content'")
        _check_text(message["content"], f"{place}.content", where)
        spoke = spoke or role == "assistant"
    if not spoke:
        raise invalid(where(), f"{column!r} has no message of the assistant: nothing to learn")


def invalid(where: str, what: str, *, pointer: str = "/data") -> DataInvalid:
    """The error for bad data at one place; of what the data itself says only so much is shown."""
    return DataInvalid(f"{where}: {shortened(what, _LONGEST_MESSAGE)}", pointer=pointer)


def unreadable(name: str, error: OSError, *, pointer: str = "/data") -> DataInvalid:
    """The error for a file that the system does not let be read, or not any more."""
    return invalid(name, f"cannot be read: {os.strerror(error.errno or 0)}", pointer=pointer)


def _check_text(value: Any, name: str, where: Callable[[], str]) -> None:
    if type(value) is not str:
        raise invalid(where(), f"{name} must be a string, found {_named(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise invalid(
                where(), f"{name} holds half of a surrogate pair at character {error.start + 1}"
            ) from None


def _named(value: Any) -> str:
    return _JSON_NAMES.get(type(value), type(value).__name__)
