"""The worker's logs: text for people or JSON for machines, with job and attempt, no secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from datetime import UTC, datetime

__all__ = ["configure", "set_attempt"]

_SECRETS = re.compile(
    r"\b(oct[ne]?_)[A-Za-z0-9_-]{16,}"
    r"|(?i:(bearer\s+))[A-Za-z0-9._~+/=-]{8,}"
    r"|(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"
)
# A supervisor has one attempt for its whole life; the agent has none.
_ids: dict[str, str] = {}


def set_attempt(job_id: str, attempt_id: str) -> None:
    """Every line of this process is about this attempt from now on."""
    _ids.update(job_id=job_id, attempt_id=attempt_id)


def configure() -> None:
    """Log to standard error: ``OCTRAIN_LOG_FORMAT`` (text, json), ``OCTRAIN_LOG_LEVEL``."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("OCTRAIN_LOG_FORMAT") == "json"
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("OCTRAIN_LOG_LEVEL", "INFO").upper())
    # One line for every request is noise: what matters of a call is logged where it is made.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def redact(text: str) -> str:
    """The text with every key, token and password replaced by ``***``."""
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}***", text)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **_ids,
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return redact(json.dumps(line, default=str, ensure_ascii=False))
