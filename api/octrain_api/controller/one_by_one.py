"""What is done one by one, so that one that fails does not stop the others."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sqlalchemy.exc import InterfaceError, OperationalError

from octrain_api.database import Database

__all__ = ["each_by_itself", "judge_each"]

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


async def each_by_itself(*works: Callable[[], Awaitable[None]]) -> None:
    """Do one after the other, whatever becomes of those before: what stops the one is no matter of
    the others. Raises what the database says when it is away."""
    for work in works:
        try:
            await work()
        except (OperationalError, InterfaceError, OSError):
            raise
        except Exception:
            log.exception("a part of the round failed, going on with the others")
