"""Nodes that can be cut off and frozen, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.watch import TrainerWatch
from tests.faults.faulty_nodes import ENVIRONMENT, Nodes, wake


@pytest.fixture(scope="module")
def nodes(start_service: Any) -> Iterator[Nodes]:
    """A service of short leases with the nodes ``near`` and ``far``."""
    made = Nodes(start_service("faults", ENVIRONMENT, workers=[]), {})
    made.add("near")
    made.add("far")
    yield made
    made.service.stack.stop()
    for proxy in made.proxies.values():
        proxy.close()


@pytest.fixture
def watch(nodes: Nodes) -> Iterator[TrainerWatch]:
    watch = TrainerWatch(nodes.service.stack.data_dir)
    watch.start()
    yield watch
    watch.stop()
    assert watch.doubles == {}, "two trainers of one job lived at one time"


@pytest.fixture
def asleep(nodes: Nodes) -> Iterator[list[int]]:
    """Processes that a test has frozen; whatever becomes of it, they are woken."""
    frozen: list[int] = []
    yield frozen
    for pid in frozen:
        wake(pid)
    for proxy in nodes.proxies.values():
        proxy.become("pass")
