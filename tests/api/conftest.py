"""The application over a real Postgres whose schema Alembic made, and what tests do with it."""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text

from octrain_api.app import create_app
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


def make_settings(postgres_url: str, redis_url: str, folder: Path) -> Settings:
    """Settings of a service whose files lie in `folder`."""
    (folder / "shared").mkdir(exist_ok=True)
    return Settings(
        database=DatabaseSettings(url=postgres_url, pool_size=5),
        broker=BrokerSettings(url=redis_url),
        storage=StorageSettings(
            artifact_url=(folder / "artifacts").as_uri(), roots_text=str(folder / "shared")
        ),
        http=HttpSettings(stream_keep_alive=0.5, stream_poll=0.2),
        controller=ControllerSettings(),
    )


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


@pytest.fixture
async def service(migrated_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Service]:
    """The application on the shared database: each test brings owners of its own."""
    async for running in _run(make_settings(migrated_url, redis_url, tmp_path), tmp_path):
        yield running


@pytest.fixture
async def lone_service(
    fresh_postgres_url: str, redis_url: str, tmp_path: Path
) -> AsyncIterator[Service]:
    """The application on a database that no other test touches: for the controller's loops."""
    migrate(DatabaseSettings(url=fresh_postgres_url))
    async for running in _run(make_settings(fresh_postgres_url, redis_url, tmp_path), tmp_path):
        yield running


@pytest.fixture
def spec() -> dict[str, Any]:
    """A small spec that any CPU node can run."""
    return copy.deepcopy(EXAMPLE_SPEC)
