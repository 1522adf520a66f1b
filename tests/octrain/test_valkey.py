"""The Valkey driver, with real servers that are really killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from octrain.local import binaries
from octrain.local.errors import LocalStackError
from octrain.local.processes import await_absence
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


def test_a_server_on_the_path_is_called_by_its_name_there(
    server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second choice, as Debian and Ubuntu install it: a link to the program that checks files,
    which is the server when it is called so."""
    program = tmp_path / "bin" / "valkey-check-rdb"
    program.parent.mkdir()
    shutil.copy2(binaries.find_valkey(), program)
    (tmp_path / "bin" / "valkey-server").symlink_to(program.name)
    monkeypatch.setattr(binaries, "_package_folder", lambda name: None)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert binaries.find_valkey() == tmp_path / "bin" / "valkey-server"
    server.start()
    try:
        assert redis.Redis.from_url(server.url()).ping()
        # And it is known for what it is to whoever would start a second one on its folder.
        monkeypatch.setattr(
            "octrain.local.valkey.await_absence", lambda find, seconds: await_absence(find, 0.0)
        )
        with pytest.raises(LocalStackError, match=f"process {server.process.pid}"):
            ValkeyServer(tmp_path, tmp_path / "second.log").start()
    finally:
        server.stop()
