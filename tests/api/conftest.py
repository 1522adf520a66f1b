"""The application over a real Postgres whose schema Alembic made, and what tests do with it."""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy import text

from octrain.local.servers import LocalServers
from octrain_api.app import create_app
from octrain_api.clocks import API, beat
from octrain_api.controller.reconciler import Reconciler
from octrain_api.controller.scheduler import Scheduler
from octrain_api.database import Database
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from octrain_api.keys.schemas import KeyRequest
from octrain_api.keys.service import KeyService
from octrain_api.migrate import migrate
from octrain_api.settings import (
    BrokerSettings,
    ControllerSettings,
    DatabaseSettings,
    HttpSettings,
    Settings,
    StorageSettings,
)
from tests.api.sockets import Start, serving


def make_settings(postgres_url: str, redis_url: str, folder: Path) -> Settings:
    """Settings of a service whose files lie in `folder`."""
    (folder / "shared").mkdir(exist_ok=True)
    return Settings(
        database=DatabaseSettings(url=postgres_url, pool_size=5),
        broker=BrokerSettings(url=redis_url),
        storage=StorageSettings(
            artifact_url=(folder / "artifacts").as_uri(), roots_text=str(folder / "shared")
        ),
        # Tests say themselves when the API is alive: see Worker.reconcile.
        http=HttpSettings(stream_keep_alive=0.5, stream_poll=0.2, alive_interval=3600),
        controller=ControllerSettings(),
    )


_TIMES = {
    table: columns.split()
    for table, columns in {
        "jobs": "created_at started_at ended_at next_attempt_at queue_deadline_at stop_deadline_at",
        "attempts": "created_at claimed_at ended_at last_heartbeat_at unreachable_since "
        "progress_at lease_expires_at lease_granted_until stalled_since run_deadline_at outage_at",
        "nodes": "last_heartbeat_at unreachable_since quarantined_since faults_from",
        "outbox": "created_at sent_at",
        "leftovers": "not_before",
    }.items()
}


@dataclass
class Service:
    """A running application and shortcuts to it."""

    app: FastAPI
    settings: Settings
    database: Database
    folder: Path
    _clients: list[httpx.AsyncClient] = field(default_factory=list)

    def client(self, key: str | None) -> httpx.AsyncClient:
        """A client that sends this key."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.AsyncClient(
            transport=transport, base_url="http://octrain/v1", headers=headers, timeout=30
        )
        self._clients.append(client)
        return client

    async def key(self, owner: str, *scopes: str) -> str:
        """A new key."""
        request = KeyRequest(name="test", owner=owner, scopes=list(scopes))  # type: ignore[arg-type]
        async with self.database.transaction() as session:
            return (await KeyService(session).create(request)).key

    async def user(self, owner: str | None = None) -> httpx.AsyncClient:
        """A client of a user with jobs of their own."""
        owner = owner or f"user-{uuid.uuid4().hex[:8]}"
        return self.client(await self.key(owner, "jobs:read", "jobs:write"))

    async def sql(self, statement: str, **values: Any) -> list[Any]:
        """Run a statement as the database's administrator would."""
        async with self.database.transaction() as session:
            result = await session.execute(text(statement), values)
            return list(result.all()) if result.returns_rows else []

    async def advance(self, seconds: float, *, service_away: bool = False) -> None:
        """Let the database's clock run, by moving every stored time into the past.

        Unless `service_away`, the API and the controller were up and are not missed.
        """
        for table, columns in _TIMES.items():
            moved = ", ".join(
                f"{c} = {c} - make_interval(secs => CAST(:s AS double precision))" for c in columns
            )
            await self.sql(f"UPDATE {table} SET {moved}", s=seconds)
        if service_away:
            await self.sql(
                "UPDATE service_clocks SET alive_at = alive_at - make_interval(secs => :s), "
                "counted_until = counted_until - make_interval(secs => :s)",
                s=seconds,
            )
        await self.sql(
            "UPDATE service_clocks SET up_since = up_since - make_interval(secs => :s)", s=seconds
        )

    async def close(self) -> None:
        """Close every client."""
        for client in self._clients:
            await client.aclose()


@pytest.fixture(scope="session")
def migrated_url(postgres_url: str) -> str:
    """A database with the schema, shared by this process's tests of the endpoints."""
    migrate(DatabaseSettings(url=postgres_url))
    return postgres_url


async def _run(settings: Settings, folder: Path) -> AsyncIterator[Service]:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        service = Service(app, settings, app.state.context.database, folder)
        yield service
        await service.close()


@pytest.fixture(scope="session")
def make_service() -> Callable[[str, str, Path], AsyncIterator[Service]]:
    """A function that runs the application on a database, for tests with a loop of their own."""

    def make(url: str, redis_url: str, folder: Path) -> AsyncIterator[Service]:
        return _run(make_settings(url, redis_url, folder), folder)

    return make


@pytest.fixture
async def service(migrated_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Service]:
    """The application on the shared database: each test brings owners of its own."""
    async for running in _run(make_settings(migrated_url, redis_url, tmp_path), tmp_path):
        yield running


@pytest.fixture(scope="session")
def template_url(database_server: LocalServers) -> str:
    """A database with the schema to which nothing stays connected: it is copied."""
    url = database_server.create_database("octrain_template")
    migrate(DatabaseSettings(url=url))
    return url


@pytest.fixture
def copied_url(template_url: str, postgres_url: str) -> str:
    """A database with the schema that only this test uses."""
    name = f"copy_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE octrain_template")
    return template_url.replace("octrain_template", name)


@pytest.fixture
async def lone_service(copied_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Service]:
    """The application on a database that no other test touches: for the controller's loops."""
    async for running in _run(make_settings(copied_url, redis_url, tmp_path), tmp_path):
        yield running


@pytest.fixture
def spec() -> dict[str, Any]:
    """A small spec that any CPU node can run."""
    return copy.deepcopy(EXAMPLE_SPEC)


class Worker:
    """A node's agent and supervisor, as far as the API can see them."""

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service = service
        self.http = http
        self.node_id = ""
        self.attempt: dict[str, Any] = {}
        self._scheduler: Scheduler | None = None
        # A key speaks for one node: this worker plays each of its nodes with the node's own.
        self._https: dict[str, httpx.AsyncClient] = {}

    async def speak_for(self, name: str) -> None:
        """Go on with the key of this node."""
        if name not in self._https:
            key = await self.service.key("operations", "node") if self._https else None
            self._https[name] = self.service.client(key) if key is not None else self.http
        self.http = self._https[name]

    async def register(self, name: str = "node-a", **changes: Any) -> dict[str, Any]:
        """Register a CPU node on which the emulated engine works, and speak for it from now on."""
        await self.speak_for(name)
        engine = {"ok": True, "reasons": [], "version": None}
        body = {
            "name": name,
            "boot_id": "boot-1",
            "hostname": "host",
            "version": "0.1.0",
            "device_kinds": ["cpu"],
            "cpu_slots": 1,
            "gpus": [],
            "engines": {
                "emulated": engine,
                "amp": engine,
                "te": {"ok": False, "reasons": ["Transformer Engine is not installed"]},
            },
            "roots": [],
            "private_roots": False,
            "artifact_url": self.service.settings.storage.artifact_url,
        } | changes
        answer = await self.http.post("/nodes/register", json=body)
        assert answer.status_code == 200, answer.text
        self.node_id = answer.json()["node_id"]
        return dict(answer.json())

    async def schedule(self) -> int:
        """Ticks of the scheduler until nothing more can be placed; how many jobs were."""
        settings = self.service.settings
        if self._scheduler is None:
            self._scheduler = Scheduler(
                self.service.database, settings.controller, settings.scheduler
            )
        return await self._scheduler.run()

    async def reconcile(self, *, api_alive: bool = True) -> None:
        """One tick of the reconciler, just after the API has said that it lives (or not)."""
        if api_alive:
            async with self.service.database.transaction() as session:
                await beat(session, API, self.service.settings.controller.downtime_tolerance)
        await Reconciler(self.service.database, self.service.settings).tick()

    async def placed(self, job_id: str) -> str:
        """The id of the job's live attempt."""
        rows = await self.service.sql(
            "SELECT id FROM attempts WHERE job_id = :job AND status <> 'ended'", job=job_id
        )
        assert len(rows) == 1
        return str(rows[0].id)

    async def claim(self, attempt_id: str, supervisor: str = "supervisor-1") -> httpx.Response:
        """Claim an attempt; remember it when it worked."""
        body = {"node_id": self.node_id, "supervisor": supervisor}
        answer = await self.http.post(f"/attempts/{attempt_id}/claim", json=body)
        if answer.status_code == 200:
            self.attempt = answer.json()
        return answer

    async def take(self, job_id: str) -> dict[str, Any]:
        """Schedule, and claim the job's attempt."""
        await self.schedule()
        answer = await self.claim(await self.placed(job_id))
        assert answer.status_code == 200, answer.text
        return self.attempt

    async def post(self, action: str, *, lost: bool = False, **body: Any) -> httpx.Response:
        """A write to the claimed attempt; an answer that is `lost` does not reach it."""
        if action == "heartbeat":
            body = {"lease_number": self.attempt["lease_number"]} | body
        body = {"fencing_token": self.attempt["fencing_token"]} | body
        answer = await self.http.post(f"/attempts/{self.attempt['attempt_id']}/{action}", json=body)
        if action == "heartbeat" and answer.status_code == 200 and not lost:
            self.attempt["lease_number"] = answer.json()["lease_number"]
        return answer

    async def telemetry(self, first_seq: int, *records: dict[str, Any]) -> httpx.Response:
        """Send records."""
        return await self.post("telemetry", first_seq=first_seq, records=list(records))

    async def finish(self, outcome: str, reason: str, **more: Any) -> httpx.Response:
        """End the attempt."""
        return await self.post("finish", outcome=outcome, reason=reason, **more)


@pytest.fixture
async def worker(lone_service: Service) -> Worker:
    """A registered CPU node with one slot, on the database of this test alone."""
    http = lone_service.client(await lone_service.key("operations", "node"))
    worker = Worker(lone_service, http)
    await worker.register()
    return worker


@pytest.fixture
async def user(lone_service: Service) -> httpx.AsyncClient:
    """A user of the lone service."""
    return await lone_service.user("ada")


Submit = Callable[..., Awaitable[str]]


@pytest.fixture
def submit(spec: dict[str, Any]) -> Submit:
    """A function that submits the small spec, with changes, and gives the job's id."""

    async def post(client: httpx.AsyncClient, **changes: Any) -> str:
        answer = await client.post("/jobs", json=spec | changes)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    return post


@pytest.fixture
async def running_job(worker: Worker, user: httpx.AsyncClient, submit: Submit) -> str:
    """A job whose training has begun on the worker, with two telemetry records stored."""
    job_id = await submit(user)
    await worker.take(job_id)
    answer = await worker.telemetry(
        1,
        {"seq": 1, "time": 1.0, "type": "phase", "phase": "training"},
        {"seq": 2, "time": 2.0, "type": "metrics", "step": 1, "values": {"train/loss": 5.5}},
    )
    assert answer.json()["acknowledged_seq"] == 2, answer.text
    return job_id


@pytest.fixture
def start(service: Service) -> Start:
    """A function that serves the shared service over sockets, with some settings changed."""
    return functools.partial(serving, service.settings)
