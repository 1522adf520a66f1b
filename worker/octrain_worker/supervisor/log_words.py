"""What a printed line tells of itself: its level, and the rank that printed it."""

from __future__ import annotations

import re

__all__ = ["level_of", "rank_of"]

# Where a level can stand: after a time, a name, a rank, but not deep in a sentence.
_HEAD = 120

_RANK = re.compile(r"\[(?:rank|default|Rank )(\d{1,9})\]")
# Python's logging in its usual formats, and whoever writes like it: in capitals.
_WORD = re.compile(r"(?<![\w-])(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?![\w-])")
# glog's, which torch uses: "W1129 12:00:00.000000 ...".
_GLOG = re.compile(r"(?:\[[^\]]{1,40}\]:?\s*)?([IWEF])\d{4} \d\d:\d\d:")
_PYTHON_WARNING = re.compile(r"\b\w*Warning: ")
_PYTHON_ERROR = re.compile(
    r"(?:\[[^\]]{1,40}\]:?\s*)?"
    r"(?:Traceback \(most recent call last\)|(?:\w+\.)*\w*(?:Error|Exception)(?::|$))"
)
_PLAIN = re.compile(r"(warning|error|fatal|critical)\b(?: error)?:", re.IGNORECASE)

_LEVELS = {
    "DEBUG": "debug",
    "INFO": "info",
    "I": "info",
    "WARNING": "warning",
    "WARN": "warning",
    "W": "warning",
    "ERROR": "error",
    "E": "error",
    "CRITICAL": "critical",
    "FATAL": "critical",
    "F": "critical",
}


def level_of(line: str) -> str | None:
    """``debug``, ``info``, ``warning``, ``error`` or ``critical``; None when it does not tell."""
    head = line[:_HEAD]
    found = _GLOG.match(head) or _WORD.search(head) or _PLAIN.match(head)
    if found is not None:
        return _LEVELS[found[1].upper()]
    if _PYTHON_ERROR.match(head):
        return "error"
    return "warning" if _PYTHON_WARNING.search(head) else None


def rank_of(line: str) -> int | None:
    """The rank of a line that torchrun or torch marked with it."""
    found = _RANK.match(line)
    return int(found[1]) if found is not None else None
