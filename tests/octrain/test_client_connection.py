"""Which server the client finds, with which key, and what it says where none answers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import octrain
from octrain.client import (
    OctrainError,
    ServerUnreachable,
)
from octrain.local.state import ApiState, StackState


def test_an_own_authority_is_trusted_or_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate")
    monkeypatch.setenv("OCTRAIN_CA_FILE", str(wrong))
    with pytest.raises(OctrainError, match="OCTRAIN_CA_FILE"):
        octrain.Client("https://octrain.example", "k")


def test_no_server_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=f"No server answers at http://127.0.0.1:{port}"):
        octrain.Client(f"http://127.0.0.1:{port}", "k").nodes()


def test_something_else_than_octrain_is_said(client: Any, server: Any, reply: Any) -> None:
    server.routes["GET /v1/nodes"] = lambda r: reply(b"<html>", content_type="text/html")
    with pytest.raises(OctrainError, match="is it an Octrain server"):
        client.nodes()


def test_url_and_key_are_found_and_the_local_key_stays_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTRAIN_DATA_DIR", str(tmp_path))
    with pytest.raises(OctrainError, match="octrain up"):
        octrain.Client()
    StackState(api=ApiState(url="http://127.0.0.1:9", key="local-key")).save(tmp_path)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600

    from octrain.client import find_connection

    local = find_connection()
    assert (local.url, local.key) == ("http://127.0.0.1:9", "local-key")
    assert "local-key" not in repr(local)
    monkeypatch.setenv("OCTRAIN_API_URL", "https://elsewhere.example/")
    assert (find_connection().url, find_connection().key) == ("https://elsewhere.example", "")
    monkeypatch.setenv("OCTRAIN_API_KEY", "env-key")
    assert find_connection().key == "env-key"
    assert find_connection("http://given", "given-key").key == "given-key"
    for url in ("https://given/v1", "https://given/v1/", "https://given/"):
        assert find_connection(url).url == "https://given"


def test_a_missing_key_is_said(server: Any, reply: Any) -> None:
    server.routes["GET /v1/nodes"] = lambda r: reply({"detail": "A key is needed."}, 401)
    with pytest.raises(OctrainError, match="set OCTRAIN_API_KEY"):
        octrain.Client(server.url).nodes()
