"""Polls: 304 and long polls see the same, and no process serves what is too old."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octrain.local.servers import LocalServers
from octrain_api.caching import Cache
from octrain_api.migrate import migrations_folder

REPOSITORY = migrations_folder().parent


async def known_tag(service: Any, job_id: str) -> None:
    """Return when the process keeps the job's tag."""
    async with asyncio.timeout(20):
        while service.app.state.context.jobs._tags.known(job_id) is None:
            await service.app.state.context.jobs.read(job_id)
            await asyncio.sleep(0.01)


async def test_an_unchanged_job_is_answered_from_memory_and_a_changed_one_is_not(
    lone_service: Any, worker: Any, user: Any, running_job: str, monkeypatch: Any
) -> None:
    # However long this machine stops the test in between.
    monkeypatch.setattr("octrain_api.listener._CERTAIN", 60.0)
    path = f"/jobs/{running_job}"
    first = await user.get(path)
    await known_tag(lone_service, running_job)
    header = {"If-None-Match": first.headers["etag"]}
    # What the database holds now is not looked at: nobody has told of a change.
    await lone_service.sql("UPDATE jobs SET version = version + 100")
    same = await user.get(path, headers=header)
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == first.headers["etag"]
    assert same.headers["cache-control"] == "private, no-cache"
    # Without the header the answer is always read.
    assert (await user.get(path)).json()["version"] == first.json()["version"] + 100
    for change in (
        lambda: worker.telemetry(3, {"type": "progress", "step": 7}),
        lambda: worker.post("heartbeat", step=8, phase="training"),
        lambda: user.post(f"{path}/cancel"),
    ):
        header = {"If-None-Match": (await user.get(path)).headers["etag"]}
        assert (await user.get(path, headers=header)).status_code == 304
        await change()
        assert (await user.get(path, headers=header)).status_code == 200


async def test_nobody_is_told_of_what_is_not_theirs(
    lone_service: Any, user: Any, running_job: str
) -> None:
    path = f"http://octrain/jobs/{running_job}"
    header = {"If-None-Match": (await user.get(path)).headers["etag"]}
    await known_tag(lone_service, running_job)
    stranger = await lone_service.user("eve")
    node = lone_service.client(await lone_service.key("ada", "node"))
    nobody = lone_service.client(None)
    admin = lone_service.client(await lone_service.key("root", "admin"))
    for _ in range(2):  # the second time the key is known
        assert (await stranger.get(path, headers=header)).status_code == 404
        assert (await node.get(path, headers=header)).status_code == 403
        assert (await nobody.get(path, headers=header)).status_code == 401
        assert (await admin.get(path, headers=header)).status_code == 304


async def test_a_queued_jobs_place_changes_tag_and_long_poll_alike(
    lone_service: Any, user: Any, submit: Any
) -> None:
    high, low = await submit(user, priority=10), await submit(user)
    before = await user.get(f"/jobs/{low}")
    version, etag = before.json()["version"], before.headers["etag"]
    header = {"If-None-Match": etag}
    polls = [
        asyncio.create_task(user.get(f"/jobs/{low}?wait=30&since_version={version}")),
        asyncio.create_task(user.get(f"/jobs/{low}?wait=30", headers=header)),
    ]
    listener = lone_service.app.state.context.listener
    while len(listener._waiting.get(low, ())) < 2:
        await asyncio.sleep(0.01)
    assert (await user.get(f"/jobs/{low}", headers=header)).status_code == 304
    await user.post(f"/jobs/{high}/cancel")
    assert (await user.get(f"/jobs/{low}", headers=header)).status_code == 200
    for answer in await asyncio.gather(*polls):
        assert answer.json()["queue_position"] == 1
        assert answer.json()["version"] == version
        assert answer.headers["etag"] != etag
    # Between two requests only the tag tells.
    late = await user.get(f"/jobs/{low}?wait=30", headers=header)
    assert (late.status_code, late.headers["etag"]) == (200, answer.headers["etag"])
    fresh = {"If-None-Match": late.headers["etag"]}
    nothing = await user.get(f"/jobs/{low}?wait=0.3", headers=fresh)
    assert nothing.status_code == 304


async def test_lists_have_tags(lone_service: Any, user: Any, submit: Any) -> None:
    job_id = await submit(user)
    first = await user.get("/jobs?limit=5")
    header = {"If-None-Match": first.headers["etag"]}
    same = await user.get("/jobs?limit=5", headers=header)
    assert (same.status_code, same.content) == (304, b"")
    assert (await user.get("/jobs?status=running", headers=header)).status_code == 200
    await user.post(f"/jobs/{job_id}/cancel")
    assert (await user.get("/jobs?limit=5", headers=header)).status_code == 200


async def test_waiters_of_one_job_share_a_read(
    lone_service: Any, user: Any, submit: Any, monkeypatch: Any
) -> None:
    job_id = await submit(user)
    jobs = lone_service.app.state.context.jobs
    reads = 0
    read = jobs.read

    async def counted(one: str) -> Any:
        nonlocal reads
        reads += 1
        return await read(one)

    version = (await user.get(f"/jobs/{job_id}")).json()["version"]
    monkeypatch.setattr(jobs, "read", counted)
    query = f"/jobs/{job_id}?wait=30&since_version={version}"
    polls = [asyncio.create_task(user.get(query)) for _ in range(50)]
    listener = lone_service.app.state.context.listener
    while len(listener._waiting.get(job_id, ())) < 50:
        await asyncio.sleep(0.01)
    await user.post(f"/jobs/{job_id}/cancel")
    answers = await asyncio.gather(*polls)
    assert {answer.json()["status"] for answer in answers} == {"cancelled"}
    assert reads < 40


async def test_what_changes_during_a_read_is_not_kept() -> None:
    current = True
    cache: Cache[str] = Cache(lambda: current, seconds=60, size=2)

    def keep(key: str, value: str, *, forgotten: str | bool | None = False) -> None:
        with cache.reading(key) as reading:
            reading.keep(value)
            if forgotten is not False:
                cache.forget(forgotten)  # type: ignore[arg-type]

    keep("a", "1")
    assert cache.get("a") == "1"
    keep("a", "2", forgotten="b")
    assert cache.get("a") == "2"
    for told in ("a", None):
        keep("a", "3", forgotten=told)
        assert cache.get("a") is None
    with cache.reading("a") as outer:
        outer.keep("old")
        keep("a", "new", forgotten=None)
    assert cache.get("a") is None
    keep("a", "4")
    current = False
    assert cache.get("a") is None
    keep("b", "5")
    current = True
    assert (cache.get("a"), cache.get("b")) == ("4", None)
    keep("b", "6")
    keep("c", "7")
    assert [cache.get(key) for key in "abc"] == [None, "6", "7"], "the oldest gives way"
    ended: Cache[str] = Cache(lambda: True, seconds=0, size=2)
    with ended.reading("a") as reading:
        reading.keep("1")
    assert ended.get("a") is None


async def test_nothing_is_certain_while_nothing_is_heard(
    lone_service: Any, worker: Any, user: Any, running_job: str
) -> None:
    """A connection on which nothing arrives any more, although it is open."""
    context = lone_service.app.state.context
    await known_tag(lone_service, running_job)
    header = {"If-None-Match": (await user.get(f"/jobs/{running_job}")).headers["etag"]}
    [(listening,)] = await lone_service.sql(
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'SELECT pg_notify(%' "
        "AND pid <> pg_backend_pid() AND datname = current_database()"
    )
    os.kill(listening, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            while context.listener.is_current:
                await asyncio.sleep(0.02)
        assert context.jobs._tags.known(running_job) is None
        await lone_service.sql("UPDATE jobs SET version = version + 1")
        assert (await user.get(f"/jobs/{running_job}", headers=header)).status_code == 200
    finally:
        os.kill(listening, signal.SIGCONT)
    async with asyncio.timeout(20):
        while not context.listener.is_current:
            await asyncio.sleep(0.02)


class Processes:
    """API processes on one database."""

    def __init__(self, url: str, redis_url: str, folder: Path) -> None:
        self._environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
            "DATABASE_URL": url,
            "REDIS_URL": redis_url,
            "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
        }
        self._running: list[subprocess.Popen[str]] = []

    def start(self) -> httpx.Client:
        """A client of a new process."""
        process = subprocess.Popen(
            [sys.executable, "-m", "octrain_api", "serve", "--port", "0"],
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if "running on http://" in line:
                address = line.split("http://")[1].split()[0]
                return httpx.Client(base_url=f"http://{address}/v1", timeout=60)
        raise AssertionError("the API did not start")

    def stop(self) -> None:
        """End them all."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def processes(
    copied_url: str, redis_url: str, tmp_path: Path, database_server: LocalServers
) -> Iterator[Processes]:
    made = Processes(copied_url, redis_url, tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
async def test_two_processes_agree_within_the_stated_bound(
    processes: Processes, lone_service: Any, user: Any, worker: Any, running_job: str
) -> None:
    """Changes through one process, 304s of the other; then a key that is revoked."""
    admin_key = await lone_service.key("root", "admin")
    here, there = await asyncio.gather(
        asyncio.to_thread(processes.start), asyncio.to_thread(processes.start)
    )
    admin = {"Authorization": f"Bearer {admin_key}"}
    body = {"name": "n", "owner": "ada", "scopes": ["jobs:read"]}
    made = here.post("/keys", json=body, headers=admin).json()
    key = {"Authorization": f"Bearer {made['key']}"}
    path = f"/jobs/{running_job}"
    latest = 0.0
    for step in range(20, 30):
        etag = there.get(path, headers=key).headers["etag"]
        for _ in range(20):
            answer = there.get(path, headers=key | {"If-None-Match": etag})
            assert answer.status_code == 304
        # This process's application is a third one on the same database.
        await worker.post("heartbeat", step=step, phase="training")
        changed_at = time.monotonic()
        while there.get(path, headers=key | {"If-None-Match": etag}).status_code == 304:
            latest = max(latest, time.monotonic() - changed_at)
            assert time.monotonic() - changed_at < 20
        assert there.get(path, headers=key).json()["attempts"][0]["step"] == step
    # The bound is 2 s; a busy machine may stop this test itself for a while.
    assert latest < 10
    revoked = here.delete(f"/keys/{made['id']}", headers=admin)
    assert revoked.status_code == 200
    assert here.get(path, headers=key).status_code == 401, "at once, where it was revoked"
    revoked_at = time.monotonic()
    while there.get(path, headers=key).status_code != 401:
        assert time.monotonic() - revoked_at < 20
    here.close()
    there.close()
