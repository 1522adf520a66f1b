"""Tasks that swallow their cancellation end all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from octrain_api.listener import JobListener
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


async def test_the_listener_ends_though_its_driver_swallows_a_cancellation(
    lone_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting = asyncio.Event()

    async def connect() -> None:
        connecting.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as error:
            raise psycopg.OperationalError("the connection was not made") from error

    monkeypatch.setattr(lone_service.database, "connect", connect)
    listening = asyncio.create_task(JobListener(lone_service.database).run())
    await connecting.wait()
    await asyncio.wait_for(end_tasks([listening], again_after=0.05), 30)
    assert listening.cancelled()
