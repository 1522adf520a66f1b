"""TLS to everything that speaks it, with an authority of our own: API, broker, database.

The embedded Valkey and Postgres are built without TLS. In front of them stands a relay that speaks
it as they would, so that what is tested is our own side: who is trusted, and who is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis
from celery import Celery
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from octrain.client import Client
from octrain.client.errors import OctrainError
from octrain_api.app import create_app
from octrain_api.controller.relay import BrokerUnavailable, CelerySender
from octrain_api.database import Database
from octrain_api.readiness import Readiness
from octrain_api.server import make_server
from octrain_api.settings import BrokerSettings, DatabaseSettings, HttpSettings
from octrain_worker.api_client import ApiClient, ApiRefused, ApiUnavailable
from octrain_worker.celery_app import celery_settings
from octrain_worker.enrolment import with_node_key
from octrain_worker.settings import ApiSettings, NodeSettings, WorkerSettings
from octrain_worker.settings import BrokerSettings as NodeBrokerSettings

PASSWORD = "of-the-key"


class Authority:
    """A certificate authority that lives as long as a test."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca_file = folder / f"{name}.pem"
        ca = self._signed(self._name, self._key.public_key(), ca=True)
        self.ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))

    def _signed(self, subject: x509.Name, key: Any, *, ca: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        usage = dict.fromkeys(
            (
                *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
                *("encipher_only", "decipher_only"),
            ),
            False,
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=ca, crl_sign=ca, **usage), True
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
            .sign(self._key, hashes.SHA256())
        )

    def server(self, password: str | None = None) -> tuple[str, str]:
        """The files of a server's certificate and key, for localhost and 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        certificate, key_file = self._folder / "server.pem", self._folder / "server.key"
        certificate.write_bytes(
            self._signed(name, key.public_key()).public_bytes(serialization.Encoding.PEM)
        )
        protection: Any = serialization.NoEncryption()
        if password is not None:
            protection = serialization.BestAvailableEncryption(password.encode())
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
            )
        )
        return str(certificate), str(key_file)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


async def test_the_api_over_https(
    lone_service: Any, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    certificate, key_file = authority.server(PASSWORD)
    http = HttpSettings(
        alive_interval=3600,
        tls_certificate=certificate,
        tls_key=key_file,
        tls_key_password=PASSWORD,  # type: ignore[arg-type]
    )
    assert PASSWORD not in repr(http)
    app = create_app(lone_service.settings.model_copy(update={"http": http}))
    server = make_server(app, http, "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}"
    admin = lone_service.client(await lone_service.key("root", "admin"))
    try:
        user_key = await lone_service.key("ada", "jobs:read")

        def with_the_client() -> None:
            with Client(url, user_key, ca_file=authority.ca_file) as client:
                assert list(client.jobs.list()) == []
            for ca_file in (None, stranger.ca_file):
                with Client(url, user_key, ca_file=ca_file) as client, pytest.raises(OctrainError):
                    list(client.jobs.list())

        await asyncio.to_thread(with_the_client)
        token = (await admin.post("/nodes/tokens", json={"owner": "ops"})).json()["token"]

        def worker_settings(ca_file: Path | None, **more: Any) -> WorkerSettings:
            api = ApiSettings(api_url=url, ca_file=ca_file, **more)
            return WorkerSettings(api=api, node=NodeSettings(name="gpu-1", data_dir=tmp_path / "n"))

        def with_the_worker() -> None:
            (tmp_path / "n").mkdir(mode=0o700)
            for ca_file in (None, stranger.ca_file):
                client = ApiClient(url, "x", ca_file=ca_file)
                with pytest.raises(ApiUnavailable):
                    client.node_metrics("x", [])
                client.close()
            wanted = worker_settings(authority.ca_file, node_token=token)
            settings = with_node_key(wanted)
            key = settings.api.node_key.get_secret_value()
            assert key.startswith("oct_")
            assert key not in repr(settings)
            assert token not in repr(settings)
            kept = tmp_path / "n" / "node.key"
            assert kept.stat().st_mode & 0o777 == 0o600
            assert token not in kept.read_text()
            # Started again with the token that is used up, or without one: the same key.
            for again in (wanted, worker_settings(authority.ca_file)):
                assert with_node_key(again).api.node_key.get_secret_value() == key
            with pytest.raises(ApiRefused, match="unknown, expired or used"):
                with_node_key(worker_settings(authority.ca_file, node_token="octn_other"))
            client = ApiClient(url, key, ca_file=authority.ca_file)
            registered = client.register(
                {
                    "name": "gpu-1",
                    "boot_id": "b",
                    "hostname": "h",
                    "version": "v",
                    "device_kinds": ["cpu"],
                    "cpu_slots": 1,
                }
            )
            assert registered.node_id.startswith("node_")
            client.close()

        await asyncio.to_thread(with_the_worker)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{port}/healthz")
    finally:
        server.should_exit = True
        await serving


def test_half_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="must be set together"):
        HttpSettings(tls_certificate="a.pem")


class Relay:
    """Speaks TLS to its clients, and passes on what they say to a server that does not."""

    def __init__(
        self, authority: Authority, target: tuple[str, int], begin: Callable[[socket.socket], None]
    ) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*authority.server())
        self._target, self._begin = target, begin
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self._begin(client)
            with (
                self._context.wrap_socket(client, server_side=True) as spoken,
                socket.create_connection(self._target) as server,
            ):
                back = threading.Thread(target=self._copy, args=(server, spoken), daemon=True)
                back.start()
                self._copy(spoken, server)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _agree_to_tls(client: socket.socket) -> None:
    """What Postgres answers to a client that asks for TLS (SSLRequest, code 80877103)."""
    request = client.recv(8, socket.MSG_WAITALL)
    assert request == (8).to_bytes(4, "big") + (80_877_103).to_bytes(4, "big")
    client.sendall(b"S")


@pytest.fixture
def broker(authority: Authority, redis_url: str) -> Iterator[str]:
    parts = httpx.URL(redis_url)
    relay = Relay(authority, (parts.host, parts.port or 6379), lambda client: None)
    yield f"rediss://:{parts.password}@127.0.0.1:{relay.port}/0"
    relay.close()


async def test_the_broker_over_rediss(
    lone_service: Any, authority: Authority, stranger: Authority, broker: str
) -> None:
    trusted = BrokerSettings(url=broker, ca_file=str(authority.ca_file))
    sender = CelerySender(trusted)
    await asyncio.to_thread(sender.send, "node.tls", "task-1", {"job_id": "j"})
    sender.close()
    for number, ca_file in enumerate((None, str(stranger.ca_file)), start=1):
        # Another database: Celery's pool keeps connections of one process by their URL.
        distrusted = BrokerSettings(url=f"{broker[:-1]}{number}", ca_file=ca_file)
        sender = CelerySender(distrusted)
        with pytest.raises(BrokerUnavailable):
            await asyncio.to_thread(sender.send, "node.tls", "task-2", {"job_id": "j"})
        sender.close()
        settings = lone_service.settings.model_copy(update={"broker": distrusted})
        found = await Readiness(lone_service.database, settings).check()
        assert found.checks["broker"].startswith("cannot be reached")
    settings = lone_service.settings.model_copy(update={"broker": trusted})
    assert (await Readiness(lone_service.database, settings).check()).checks["broker"] == "ok"


def test_a_node_reaches_the_broker_over_rediss(
    authority: Authority, stranger: Authority, broker: str
) -> None:
    def reach(ca_file: Path | None) -> bool:
        settings = WorkerSettings(
            api=ApiSettings(ca_file=ca_file), broker=NodeBrokerSettings(redis_url=broker)
        )
        app = Celery("node", broker=settings.broker.redis_url)
        app.conf.update(celery_settings(settings, "node.tls", 1))
        with app.connection_for_read() as connection, connection.channel() as channel:
            return bool(channel.client.ping())

    assert reach(authority.ca_file)
    for ca_file in (None, stranger.ca_file):
        with pytest.raises(redis.exceptions.ConnectionError):
            reach(ca_file)


async def test_the_database_over_tls(
    copied_url: str, authority: Authority, stranger: Authority
) -> None:
    parts = httpx.URL(copied_url)
    relay = Relay(authority, (parts.host, parts.port or 5432), _agree_to_tls)
    base = str(parts.copy_with(port=relay.port))

    async def reach(query: str) -> str:
        database = Database(DatabaseSettings(url=f"{base}?{query}"))
        try:
            connection = await database.connect()
            async with connection:
                await connection.execute("SELECT 1")
            async with database.session() as session:
                return str((await session.connection()).dialect.name)
        finally:
            await database.close()

    verified = f"sslmode=verify-full&sslrootcert={authority.ca_file}"
    assert await reach(verified) == "postgresql"
    for query in (
        f"sslmode=verify-full&sslrootcert={stranger.ca_file}",
        "sslmode=verify-full&sslrootcert=system",
    ):
        with pytest.raises(psycopg.OperationalError):
            await reach(query)
    relay.close()


async def test_a_database_without_tls_is_not_spoken_to(copied_url: str) -> None:
    """`sslmode=require` is never silently given up."""
    database = Database(DatabaseSettings(url=f"{copied_url}?sslmode=require"))
    with pytest.raises(psycopg.OperationalError, match="SSL"):
        await database.connect()
    await database.close()
