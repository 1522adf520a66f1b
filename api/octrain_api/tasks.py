"""Ending tasks of the event loop."""

import asyncio
from collections.abc import Collection
from typing import Any


async def end_tasks(tasks: Collection[asyncio.Task[Any]], again_after: float = 1.0) -> None:
    """Cancel tasks until all have ended; whatever they end with is theirs.

    Once is not always enough: a driver that is cancelled while it connects may answer with an error
    of its own, which a loop takes for a database that is away, and goes on. So those still there
    after ``again_after`` seconds are cancelled again.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_after)
    for task in tasks:
        if not task.cancelled():
            task.exception()
