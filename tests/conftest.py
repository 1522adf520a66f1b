"""Fixtures that every test may use: a real Postgres and a real Valkey, one of each per process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from octrain.local.servers import LocalServers

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def database_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServers]:
    """Running servers, shared by all tests of this process; they end with it, however it ends.

    fsync is off here: it guards against the machine's crash, which no test causes.
    """
    settings = {"fsync": "off", "max_connections": "200"}
    with LocalServers(tmp_path_factory.mktemp("servers"), settings=settings) as servers:
        yield servers


@pytest.fixture(scope="session")
def postgres_url(database_server: LocalServers) -> str:
    """postgresql://… of a database of this process, empty at the start of the session."""
    return database_server.postgres_url


@pytest.fixture
def fresh_postgres_url(database_server: LocalServers) -> str:
    """postgresql://… of an empty database that only this test uses."""
    return database_server.create_database(f"test_{next(_numbers)}")


@pytest.fixture(scope="session")
def redis_url(database_server: LocalServers) -> str:
    """redis://… of this process's Valkey, database 0."""
    return database_server.redis_url
