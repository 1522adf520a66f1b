"""The Valkey driver, with real servers that are really killed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from octrain.local.valkey import ValkeyServer


@pytest.fixture
def server(tmp_path: Path) -> ValkeyServer:
    return ValkeyServer(tmp_path, tmp_path / "valkey.log")


def test_it_is_private_and_configured_as_a_broker(server: ValkeyServer, tmp_path: Path) -> None:
    server.start()
    try:
        client = redis.Redis.from_url(server.url(), decode_responses=True)
        settings = client.config_get("*")
        assert settings["bind"] == "127.0.0.1"
        assert settings["appendonly"] == "yes"
        assert settings["maxmemory-policy"] == "noeviction"
        with pytest.raises(redis.AuthenticationError):
            redis.Redis("127.0.0.1", server.port, retry=Retry(NoBackoff(), 0)).ping()
        assert server.password not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert (tmp_path / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0
    finally:
        server.stop()


def test_what_was_written_survives_sigkill(server: ValkeyServer) -> None:
    server.start()
    try:
        client = redis.Redis.from_url(server.url())
        for number in range(100):
            client.lpush("queue", number)
        assert server.process.pid is not None
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.popen.wait()  # type: ignore[union-attr]
        port = server.port
        server.start()
        assert server.port == port
        assert redis.Redis.from_url(server.url()).llen("queue") == 100
    finally:
        server.stop()


def test_a_taken_port_is_exchanged_for_another(server: ValkeyServer) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        server.port = taken = squatter.getsockname()[1]
        server.start()
        try:
            assert server.port != taken
            assert redis.Redis.from_url(server.url()).ping()
        finally:
            server.stop()
