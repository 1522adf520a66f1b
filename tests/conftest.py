"""Fixtures that every test may use: a real Postgres and a real Valkey, and the whole service, each
once per process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest

from fp8core.commands.imports import importing
from octrain.local.processes import become_subreaper
from octrain.local.servers import LocalServers
from octrain.local.stack import LocalStack
from tests.running_service import Service, corpus

_numbers = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Tests, and the libraries that they import, stay: walking them again and again takes half the
    time in which they are collected, and later a part of each test that collects garbage.
    """
    with importing():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, one process takes the files that mostly wait."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.spread import Spread

    return Spread(config, log)


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


StartService = Callable[..., Service]


@pytest.fixture(scope="session")
def start_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartService]:
    """Starts a stack of its own, to be used for one module; all end with the session."""
    started: list[Service] = []
    become_subreaper()

    def start(name: str, environment: Mapping[str, str], **arguments: Any) -> Service:
        folder = tmp_path_factory.mktemp(name)
        root = corpus(folder / "root")
        stack = LocalStack(
            folder / "data", roots=[root], environment=dict(environment), **arguments
        )
        stack.start()
        service = Service(stack, root)
        started.append(service)
        assert stack.wait_for_nodes(), service.tails()
        return service

    yield start
    for service in started:
        service.close()
        service.stack.stop()


@pytest.fixture(scope="session")
def service(start_service: StartService) -> Service:
    """The stack that most tests share: one node of two CPU slots, a spare trainer kept ready."""
    environment = {
        "OCTRAIN_WORKER_CPU_SLOTS": "2",
        "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "0.5",
        "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
        "OMP_NUM_THREADS": "1",
    }
    return start_service("service", environment)
