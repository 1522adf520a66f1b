"""Times as callers write them."""

import re
from datetime import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BeforeValidator

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def _written_out(value: Any) -> Any:
    if isinstance(value, datetime) or (isinstance(value, str) and _DATE.match(value)):
        return value
    raise ValueError("a time is written as 2026-01-31T12:00:00Z")


# A date, and mostly a time of day; not a number of seconds, which would be taken otherwise.
WrittenTime = Annotated[datetime, BeforeValidator(_written_out)]
WrittenAwareTime = Annotated[AwareDatetime, BeforeValidator(_written_out)]
