"""Keyset pagination: a cursor names the last row seen, so that inserts shift no page."""

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, Field

from octrain_api.problems import Problem, ProblemError


class Page(BaseModel):
    """Where a list goes on; null at its end."""

    next_cursor: str | None = Field(description="pass it as `cursor` for the next page")


def encode_cursor(time: datetime, identifier: str) -> str:
    """The cursor after a row."""
    text = json.dumps([time.isoformat(), identifier])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[datetime, str]:
    """The row that a cursor names; 422 for anything that `encode_cursor` did not make."""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        time, identifier = json.loads(raw)
        when = datetime.fromisoformat(time)
        if not isinstance(identifier, str) or when.tzinfo is None or "\x00" in identifier:
            raise ValueError(cursor)
    except (ValueError, TypeError, binascii.Error) as error:
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
