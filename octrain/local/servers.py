"""Postgres and Valkey together, without the rest of the stack: for tests and for development."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from octrain.local.accounts import choose_account
from octrain.local.postgres import PostgresServer
from octrain.local.valkey import ValkeyServer


class LocalServers:
    """A context manager around one Postgres and one Valkey on ``data_dir``.

    Must be entered from the main thread, and must not share its folder with another instance.
    ``settings`` are Postgres settings, such as ``{"fsync": "off"}`` for a throw-away database.
    """

    def __init__(self, data_dir: Path, *, settings: Mapping[str, str] | None = None) -> None:
        account = choose_account()
        logs = data_dir / "logs"
        self.postgres = PostgresServer(
            data_dir, logs / "postgres.log", settings=settings or {}, account=account
        )
        self.valkey = ValkeyServer(data_dir, logs / "valkey.log", account=account)

    @property
    def postgres_url(self) -> str:
        return self.postgres.url()

    @property
    def redis_url(self) -> str:
        return self.valkey.url()

    def create_database(self, name: str) -> str:
        """Make an empty database (kept when it exists); its URL."""
        return self.postgres.create_database(name)

    def start(self) -> None:
        self.valkey.start()
        try:
            self.postgres.start()
        except BaseException:
            self.valkey.stop()
            raise

    def stop(self) -> None:
        self.valkey.stop()
        self.postgres.stop()

    def __enter__(self) -> LocalServers:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
