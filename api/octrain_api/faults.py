"""What keeps a command of the server from its work, in the words of a person: no traceback."""

import os
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from octrain_api.migrate import SchemaMismatch

__all__ = ["Fault", "told"]


class Fault(NamedTuple):
    """The line to print, and the exit status."""

    message: str
    status: int


def told(error: Exception) -> Fault | None:
    """The fault of the surroundings that an error tells of; None: it is a fault of the program.

    Values of settings are left out, since passwords are among them.
    """
    match error:
        case SchemaMismatch():
            return Fault(str(error), 3)
        case ValidationError() if error.title.endswith("Settings"):
            return Fault("\n".join(_wrong_settings(error)), 2)
        case OperationalError():
            reason = " ".join(str(error.orig).split())
            return Fault(f"The database cannot be used. {_where()} It was said: {reason}", 1)
        case _:
            return None


def _wrong_settings(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [
        f"{error.title}, {'.'.join(map(str, one['loc']))}: "
        + one["msg"].removeprefix("Value error, ")
        for one in found
    ]


def _where() -> str:
    if "DATABASE_URL" in os.environ:
        return "DATABASE_URL tells where it is."
    return "Set DATABASE_URL to a Postgres, as postgresql://user@host/database."
