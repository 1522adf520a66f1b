"""Tasks that swallow their cancellation end all the same."""

from __future__ import annotations

import asyncio

from octrain_api.tasks import end_tasks


async def test_a_loop_that_takes_its_cancellation_for_an_outage_ends() -> None:
    swallowed = 0

    async def loop() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 2:
                    raise

    async def fails() -> None:
        raise OSError("the database is away")

    async def ends() -> None:
        return

    tasks = [asyncio.create_task(work()) for work in (loop, fails, ends)]
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks(tasks, again_after=0.05), 30)
    assert swallowed == 3
    assert all(task.done() for task in tasks)
