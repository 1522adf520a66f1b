"""Settings from the environment, nested per concern. Durations are in seconds."""

import os
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class DatabaseSettings(BaseSettings):
    """Where PostgreSQL is: DATABASE_URL, the rest by OCTRAIN_DATABASE_*."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_DATABASE_", populate_by_name=True)

    url: str = Field(
        default="postgresql://octrain@127.0.0.1:5432/octrain",
        validation_alias="DATABASE_URL",
        repr=False,
    )
    pool_size: int = Field(default=10, ge=1, le=200)
    max_overflow: int = Field(default=20, ge=0, le=500)
    connect_timeout: int = Field(default=10, ge=1)

    @field_validator("url")
    @classmethod
    def _postgres_only(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme.split("+")[0] not in {"postgresql", "postgres"}:
            raise ValueError("DATABASE_URL must be a postgresql:// URL: no other database serves")
        return f"postgresql://{rest}"

    @cached_property
    def sqlalchemy_url(self) -> str:
        """The URL with the driver named, as SQLAlchemy takes it."""
        return self.url.replace("postgresql://", "postgresql+psycopg://", 1)


class BrokerSettings(BaseSettings):
    """The Celery broker: REDIS_URL. Only the controller's relay needs it."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_BROKER_", populate_by_name=True)

    url: str = Field(default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL", repr=False)
    connect_timeout: float = Field(default=3.0, gt=0)


class StorageSettings(BaseSettings):
    """Where artifacts lie, and below which folders the paths of a spec may point."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_", populate_by_name=True)

    artifact_url: str = Field(default_factory=lambda: (Path.cwd() / "artifacts").as_uri())
    roots_text: str = Field(default="", validation_alias="OCTRAIN_ROOTS")
    data_check_bytes: int = Field(default=64 * 2**20, ge=0)

    @cached_property
    def roots(self) -> tuple[Path, ...]:
        """The allowed roots, symlinks resolved."""
        return tuple(Path(p).resolve() for p in self.roots_text.split(os.pathsep) if p)


class HttpSettings(BaseSettings):
    """Bounds of the HTTP server."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_HTTP_")

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    max_spec_bytes: int = Field(default=2**20, ge=1024)
    stream_keep_alive: float = Field(default=15.0, gt=0)
    # Streams and long polls are woken by the database; this is how long a lost wake-up may cost.
    stream_poll: float = Field(default=2.0, gt=0)
    alive_interval: float = Field(default=2.0, gt=0)


class ControllerSettings(BaseSettings):
    """Clocks of the scheduler, the relay and the reconciler."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_CONTROLLER_")

    tick: float = Field(default=1.0, gt=0)
    heartbeat_interval: int = Field(default=5, ge=1)
    heartbeat_ttl: int = Field(default=30, ge=2)
    # An expired lease is acted on this much later: clock drift and an answer on its way.
    lease_margin: int = Field(default=15, ge=0)
    # Silence of the API or the controller longer than this is downtime, added to every lease.
    downtime_tolerance: int = Field(default=10, ge=2)
    # How long a supervisor that has passed its cancel deadline may keep its lease.
    forced_lease: int = Field(default=30, ge=1)
    resend_after: float = Field(default=30.0, gt=0)
    max_sendings: int = Field(default=3, ge=1)


class SchedulerSettings(BaseSettings):
    """How queued jobs are placed, and when a node is set aside."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_SCHEDULER_")

    # Whether a job may pause running jobs of lower priority that hold the slots it needs.
    preemption: Literal["off", "pause"] = "off"
    # Placements per transaction: also the most that one tick places before the next begins.
    batch: int = Field(default=100, ge=1, le=1000)
    # What queued jobs wait for is stated when it changes, and anew at least this often.
    refresh: float = Field(default=10.0, ge=0)
    # A job of several GPUs that has waited this long has a node kept free for it.
    reserve_after: float = Field(default=120.0, ge=0)
    # So many faults in a row, of different jobs within the window, set a node aside; 0 never does.
    fault_limit: int = Field(default=3, ge=0)
    fault_window: int = Field(default=3600, ge=1)


class Settings(BaseSettings):
    """All settings; each part reads its own variables."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_")

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    broker: BrokerSettings = Field(default_factory=BrokerSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    controller: ControllerSettings = Field(default_factory=ControllerSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
