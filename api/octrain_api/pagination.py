"""Keyset pagination: a cursor names the last row seen, so that inserts shift no page."""

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from fp8core.spec.document import faults_of
from octrain_api.problems import Problem, ProblemError


class Page(BaseModel):
    """Where a list goes on; null at its end."""

    next_cursor: str | None = Field(description="pass it as `cursor` for the next page")


def encode_cursor(time: datetime, identifier: str) -> str:
    """The cursor after a row."""
    text = json.dumps([time.isoformat(), identifier])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def cursor_value(cursor: str) -> Any:
    """The JSON that a cursor holds. Errors: ValueError, also for texts that nothing can store."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        value = json.loads(raw)
    except (binascii.Error, RecursionError) as error:
        raise ValueError(cursor) from error
    if faults_of(value, texts=True):
        raise ValueError(cursor)
    return value


def decode_cursor(cursor: str) -> tuple[datetime, str]:
    """The row that a cursor names; 422 for anything that `encode_cursor` did not make."""
    try:
        time, identifier = cursor_value(cursor)
        when = datetime.fromisoformat(time)
        if not isinstance(identifier, str) or when.tzinfo is None:
            raise ValueError(cursor)
    except (ValueError, TypeError) as error:
        message = "this is not a cursor of this list"
        raise Problem(
            422,
            "request-invalid",
            "Request not valid",
            f"cursor: {message}",
            errors=[ProblemError(pointer="/query/cursor", message=message, code="cursor")],
        ) from error
    return when, identifier


def cut(rows: Sequence[object], limit: int) -> bool:
    """Whether there is a page after this one, given one row more than asked for."""
    return len(rows) > limit
