"""Everybody who calls the service, on a database of its own, in a loop of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from octrain_api.clocks import API, beat
from octrain_api.controller.reconciler import Reconciler
from octrain_api.controller.relay import CelerySender, place_elsewhere, relay
from octrain_api.controller.scheduler import Scheduler
from octrain_api.settings import SchedulerSettings

NODES: dict[str, dict[str, Any]] = {
    "cpu": {"cpu_slots": 2},
    "private": {"cpu_slots": 1, "private_roots": True},
    "gpu": {
        "cpu_slots": 0,
        "device_kinds": ["cuda"],
        "gpus": [{"index": i, "name": "H200", "memory_bytes": 1} for i in range(2)],
    },
}


RESOURCES = [{"device": "cpu"}, {"device": "cuda", "gpus": 1}, {"device": "cuda", "gpus": 2}]
ENDINGS = [
    ("succeeded", "completed", False),
    ("stopped", "stopped_by_request", True),
    ("stopped", "cancelled_by_user", False),
    ("failed", "trainer_crashed", True),
    ("failed", "worker_lost", True),
    ("failed", "out_of_memory", False),
    ("failed", "data_invalid", True),
    ("failed", "internal_error", False),
]
PICK = st.integers(0, 1000)
WISHES = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "resources": st.sampled_from(RESOURCES),
        "limits": st.sampled_from(
            [
                {"lease_ttl_seconds": 60, "cancel_deadline_seconds": 30},
                {"lease_ttl_seconds": 60, "max_restarts": 0},
                {"max_queue_time_seconds": 40, "restart_backoff_seconds": 30},
                {"max_run_time_seconds": 50, "cancel_deadline_seconds": 10},
                {"stall_timeout_seconds": 25, "on_stall": "restart", "max_restarts": 1},
                {"stall_timeout_seconds": 25, "on_stall": "fail"},
            ]
        ),
    }
)
USER_ACTIONS = st.sampled_from(["cancel", "pause", "resume", "start"])
TICKS = st.sampled_from(["scheduler", "relay", "reconciler", "reconciler without the API"])
NODE_ACTIONS = st.sampled_from(
    ["heartbeat", "register", "reboot", "drain", "drain?release=true", "undrain", "release"]
)
METRIC = {"type": "metrics", "time": 1.0, "values": {"train/loss": 1.0}}
SAVES = st.integers(1, 3).map(
    lambda n: (
        "artifacts",
        {
            "kind": "checkpoint",
            "name": f"step-{n}",
            "step": n,
            "files": [{"path": "x", "size": 1, "sha256": "0" * 64}],
        },
    )
)
WRITES = st.one_of(
    st.tuples(
        st.just("heartbeat"),
        st.fixed_dictionaries({"step": st.none() | st.integers(0, 50), "lost": st.booleans()}),
    ),
    st.integers(1, 3).map(
        lambda n: (
            "telemetry",
            {"records": [METRIC | {"step": i} for i in range(n)]},
        )
    ),
    SAVES,
)
FINISHES = st.sampled_from(ENDINGS).map(
    lambda e: (
        "finish",
        {"outcome": e[0], "reason": e[1], "resumable": e[2], "step": 3},
    )
)


class Calls:
    """What everybody may say."""

    pick, wishes, user_actions, ticks = PICK, WISHES, USER_ACTIONS, TICKS
    node_actions, writes, finishes, metric = NODE_ACTIONS, WRITES, FINISHES, METRIC
    saves = st.none() | SAVES


class Nodes:
    """Every node, each with its own key: a call is made with the key of the node it is about."""

    def __init__(self, service: Any, keys: dict[str, httpx.AsyncClient]) -> None:
        self._service, self._keys = service, keys

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        return await self._keys[await self._name(path, json)].post(path, json=json)

    async def _name(self, path: str, body: dict[str, Any]) -> str:
        _, kind, identifier, *_ = path.split("/")
        if identifier == "register":
            return str(body["name"])
        found = {
            "nodes": "SELECT name FROM nodes WHERE id = :id",
            "attempts": "SELECT n.name FROM attempts a JOIN nodes n ON n.id = a.node_id "
            "WHERE a.id = :id",
        }
        rows = await self._service.sql(found[kind], id=identifier)
        return str(rows[0].name)


class World:
    """The service on a database of its own, and everybody's keys."""

    nodes, calls = NODES, Calls

    def __init__(self, service: Any, loop: asyncio.AbstractEventLoop, redis_url: str) -> None:
        self.service, self.loop = service, loop
        self.sender = CelerySender(service.settings.broker)
        self.run(self._keys())

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _keys(self) -> None:
        service = self.service
        self.user = await service.user("ada")
        self.stranger = await service.user("eve")
        keys = {name: service.client(await service.key("operations", "node")) for name in NODES}
        self.node = Nodes(service, keys)
        self.admin = service.client(await service.key("root", "admin"))

    async def reset(self) -> None:
        await self.service.sql(
            "TRUNCATE jobs, nodes, outbox, queue_groups, service_clocks, idempotency_keys CASCADE"
        )
        settings = self.service.settings
        self.scheduler = Scheduler(
            self.service.database,
            settings.controller,
            SchedulerSettings(preemption="pause", batch=3, reserve_after=30, fault_limit=2),
        )
        self.reconciler = Reconciler(self.service.database, settings)
        self.ids: dict[str, str] = {}
        self.boots = Counter[str]()
        self.skipped = 0.0
        for name in NODES:
            await self.register(name)

    @property
    def now(self) -> float:
        """The clock of everybody's machines, in seconds: it goes on as the database's does."""
        return time.monotonic() + self.skipped

    async def advance(self, seconds: float, *, service_away: bool = False) -> None:
        """Let every clock run on."""
        self.skipped += seconds
        await self.service.advance(seconds, service_away=service_away)

    async def register(self, name: str) -> httpx.Response:
        engine = {"ok": True, "reasons": [], "version": None}
        answer = await self.node.post(
            "/nodes/register",
            json={
                "name": name,
                "boot_id": f"boot-{self.boots[name]}",
                "hostname": name,
                "version": "0.1.0",
                "device_kinds": ["cpu"],
                "gpus": [],
                "engines": {"emulated": engine},
                "artifact_url": self.service.settings.storage.artifact_url,
            }
            | NODES[name],
        )
        assert answer.status_code == 200, answer.text
        self.ids[name] = answer.json()["node_id"]
        return answer

    async def reconcile(self, api_alive: bool) -> None:
        if api_alive:
            async with self.service.database.transaction() as session:
                tolerance = self.service.settings.controller.downtime_tolerance
                await beat(session, API, tolerance)
        await self.reconciler.tick()

    async def relay(self) -> None:
        controller = self.service.settings.controller
        await relay(self.service.database, controller, self.sender)
        await place_elsewhere(self.service.database, controller)


@pytest.fixture
def world(copied_url: str, redis_url: str, tmp_path: Path, make_service: Any) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    running = make_service(copied_url, redis_url, tmp_path)
    service = loop.run_until_complete(anext(running))
    made = World(service, loop, redis_url)
    yield made
    made.sender.close()
    loop.run_until_complete(running.aclose())
    loop.close()
