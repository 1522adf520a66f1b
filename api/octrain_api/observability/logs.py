"""Structured logs: text for people or JSON for machines, with the ids of the work, without secrets.

Keys, tokens and passwords in URLs are taken out of every line, whoever wrote it: the places that
handle them log none, and this holds for what libraries and errors add.
"""

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

from octrain_api.observability.context import current
from octrain_api.settings import LogSettings

# Our own keys and tokens, bearer headers, and `scheme://user:password@`.
_SECRETS = re.compile(
    r"\b(oct[nes]?_)[A-Za-z0-9_-]{16,}"
    r"|(?i:(bearer\s+))[A-Za-z0-9._~+/=-]{8,}"
    r"|(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"
)
_IDS = ("request_id", "job_id", "attempt_id")


def redact(text: str) -> str:
    """The text with every key, token and password replaced by `***`."""
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}***", text)


def _ids(record: logging.LogRecord) -> dict[str, str]:
    work = current()
    found = work.fields() if work is not None else {}
    # What a call gives as `extra` goes before what the task is at.
    return found | {name: str(value) for name in _IDS if (value := getattr(record, name, None))}


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, logger, message, and the ids in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it."""
        line, newline, rest = super().format(record).partition("\n")
        ids = " ".join(f"{name}={value}" for name, value in _ids(record).items())
        return redact(f"{line} [{ids}]{newline}{rest}" if ids else line + newline + rest)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the ids, `fields`, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return redact(json.dumps(line, default=str, ensure_ascii=False))


def configure(settings: LogSettings) -> None:
    """Send the process's logs to standard error, in the form and from the level of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level)
    # Celery and httpx tell of each call; what matters of it is logged where it is made.
    for name in ("httpx", "httpcore", "alembic.runtime.plugins"):
        logging.getLogger(name).setLevel(logging.WARNING)
