"""Judging jobs one by one, each in a transaction of its own."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sqlalchemy.exc import InterfaceError, OperationalError

from octrain_api.database import Database

log = logging.getLogger("octrain_api.controller")


async def judge_each(
    database: Database,
    rows: Iterable[Any],
    judge: Callable[..., Awaitable[None]],
) -> None:
    """Call `judge` with a session and the fields of each row; its job's id comes first.

    One that fails is logged and rolled back, and tried again when it is found again; the others are
    judged all the same. Raises what the database says when it is away: that is no job's fault.
    """
    for row in rows:
        try:
            async with database.transaction() as session:
                await judge(session, *row)
        except (OperationalError, InterfaceError, OSError):
            raise
        except Exception:
            log.exception("job %s could not be judged, going on with the others", row[0])
