"""The loop at work: many endpoints at once, and a controller that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octrain_api.migrate import migrations_folder
from octrain_api.settings import Settings

REPOSITORY = migrations_folder().parent
LOOPBACK = "127.0.0.0/8"


async def test_endpoints_that_hang_do_not_starve_the_others(
    hooks: Any, receiver: Any, submit: Any
) -> None:
    hooks.use(concurrency=4, concurrency_per_endpoint=2, timeout=60)
    receiver.answer = lambda request, handler: (
        (200, {}, b"") if request.path == "/good" else receiver.closing.wait(120) and None
    )
    for number in range(6):
        await hooks.make(receiver.url(f"/bad{number}"))
    await hooks.service.sql("UPDATE webhooks SET failing_since = now()")
    good = await hooks.make(receiver.url("/good"))
    running = asyncio.create_task(hooks.loop.run())
    for _ in range(20):
        await submit(hooks.user)
    async with asyncio.timeout(30):
        while sum(d["status"] == "delivered" for d in await hooks.log(good["id"])) < 20:
            await asyncio.sleep(0.05)
    paths = [request.path for request in receiver.requests]
    assert len(paths) == 22, "one each of two endpoints that hang, and all of the good one"
    assert len(set(paths)) == 3
    hooks.loop.stop()
    await asyncio.wait_for(running, 20)
    rows = await hooks.service.sql(
        "SELECT 1 FROM webhook_deliveries WHERE claimed_until IS NOT NULL"
    )
    assert rows == [], "claims are given up at the end"


def _controller(settings: Settings, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
        "DATABASE_URL": settings.database.url,
        "REDIS_URL": settings.broker.url,
        "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
        "OCTRAIN_CONTROLLER_TICK": "0.2",
        "OCTRAIN_WEBHOOK_ALLOW_HTTP": "true",
        "OCTRAIN_WEBHOOK_ALLOWED_NETWORKS": LOOPBACK,
        "OCTRAIN_WEBHOOK_TIMEOUT": "60",
    }
    with (folder / "controller.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "octrain_api", "controller"],
            env=environment,
            stdout=log,
            stderr=log,
        )


async def test_a_controller_killed_in_a_delivery_delivers_after_its_restart(
    hooks: Any, receiver: Any, worker: Any, submit: Any, tmp_path: Path
) -> None:
    """And the jobs are placed while the endpoint hangs."""
    receiver.answer = lambda request, handler: receiver.closing.wait(120) and None
    webhook = await hooks.make(receiver.url(), events=["job.queued"])
    process = _controller(hooks.service.settings, tmp_path)
    try:
        job_id = await submit(hooks.user)
        arrived = await asyncio.to_thread(receiver.arrived.wait, 60)
        assert arrived, (tmp_path / "controller.log").read_text()
        async with asyncio.timeout(60):
            while (await hooks.user.get(f"/jobs/{job_id}")).json()["status"] == "queued":
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        [delivery] = await hooks.log(webhook["id"])
        assert (delivery["status"], delivery["attempts"]) == ("pending", [])
        receiver.answer = lambda request, handler: (200, {}, b"")
        # The dead one's claim runs out.
        await hooks.service.sql("UPDATE webhook_deliveries SET claimed_until = now()")
        process = _controller(hooks.service.settings, tmp_path)
        deadline = time.monotonic() + 60
        while (await hooks.log(webhook["id"]))[0]["status"] != "delivered":
            assert time.monotonic() < deadline, (tmp_path / "controller.log").read_text()
            await asyncio.sleep(0.05)
        first, second = receiver.requests
        assert first.message_id == second.message_id
        assert first.body == second.body
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait(30)
