"""Settings from the environment, nested per concern. Durations are in seconds."""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import DirectoryPath, Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from octrain_api.webhooks.addresses import Network, parse_networks


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
    # Seconds for which the API waits on a database that answers nobody, whatever it is asked.
    answer_timeout: float = Field(default=15.0, gt=0)

    @field_validator("url")
    @classmethod
    def _postgres_only(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme.split("+")[0] not in {"postgresql", "postgres"}:
            raise ValueError("DATABASE_URL must be a postgresql:// URL: no other database serves")
        try:
            make_url(f"postgresql://{rest}")
        except (ArgumentError, ValueError):
            # Theirs repeat what they could not read, be it a password.
            raise ValueError("DATABASE_URL is no URL, or its port no number") from None
        return f"postgresql://{rest}"

    @cached_property
    def sqlalchemy_url(self) -> str:
        """The URL with the driver named, as SQLAlchemy takes it."""
        return self.url.replace("postgresql://", "postgresql+psycopg://", 1)


class BrokerSettings(BaseSettings):
    """The Celery broker: REDIS_URL. Only the controller's relay needs it."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_BROKER_", populate_by_name=True)

    url: str = Field(default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL", repr=False)
    # With rediss://: a PEM file of certificate authorities to trust in place of the system's.
    ca_file: str | None = None
    connect_timeout: float = Field(default=3.0, gt=0)


class StorageSettings(BaseSettings):
    """Where artifacts lie, and below which folders the paths of a spec may point."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_", populate_by_name=True)

    artifact_url: str = Field(default_factory=lambda: (Path.cwd() / "artifacts").as_uri())
    roots_text: str = Field(default="", validation_alias="OCTRAIN_ROOTS")
    # Owners who may read other folders than `roots`: JSON, {"ada": ["/data/ada"]}.
    owner_roots: dict[str, list[str]] = Field(default_factory=dict)
    data_check_bytes: int = Field(default=64 * 2**20, ge=0)

    @cached_property
    def roots(self) -> tuple[Path, ...]:
        """The allowed roots, symlinks resolved."""
        return tuple(Path(p).resolve() for p in self.roots_text.split(os.pathsep) if p)

    def own_roots(self, owner: str) -> tuple[Path, ...] | None:
        """The roots of this owner alone, symlinks resolved; None for one who has everybody's."""
        given = self.owner_roots.get(owner)
        return tuple(Path(p).resolve() for p in given) if given is not None else None

    def roots_of(self, owner: str) -> tuple[Path, ...]:
        """The folders of this server that the owner's specs may name."""
        own = self.own_roots(owner)
        return self.roots if own is None else own

    @field_validator("owner_roots")
    @classmethod
    def _absolute(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        for owner, roots in value.items():
            for root in roots:
                if not os.path.isabs(root):
                    raise ValueError(f"the root {root!r} of {owner!r} is not an absolute path")
        return value


class HttpSettings(BaseSettings):
    """Bounds of the HTTP server."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_HTTP_")

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    max_spec_bytes: int = Field(default=2**20, ge=1024)
    max_url_bytes: int = Field(default=16 * 2**10, ge=256)
    max_head_bytes: int = Field(default=64 * 2**10, ge=1024)
    max_headers: int = Field(default=100, ge=10)
    # Nested arrays and objects of a JSON body; its members and items, all together.
    max_json_depth: int = Field(default=64, ge=8, le=500)
    max_json_values: int = Field(default=2_000_000, ge=1000)
    max_connections: int = Field(default=4096, ge=1)
    # Slow clients: see octrain_api.connections.
    head_timeout: float = Field(default=20.0, gt=0)
    body_grace: float = Field(default=30.0, gt=0)
    min_body_rate: float = Field(default=1024.0, gt=0)
    write_timeout: float = Field(default=60.0, gt=0)
    keep_alive_timeout: int = Field(default=30, ge=1)
    # PEM files; with a certificate the server speaks TLS only.
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_key_password: SecretStr | None = None
    stream_keep_alive: float = Field(default=15.0, gt=0)
    # Streams and long polls are woken by the database; this is how long a lost wake-up may cost.
    stream_poll: float = Field(default=2.0, gt=0)
    # After so long a stream is ended with `reconnect`; and so many are served by one process.
    stream_lifetime: float = Field(default=900.0, gt=0)
    stream_most: int = Field(default=4000, ge=1)
    alive_interval: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "OCTRAIN_HTTP_TLS_CERTIFICATE and OCTRAIN_HTTP_TLS_KEY must be set together"
            )
        return self


class KeySettings(BaseSettings):
    """API keys."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_KEYS_")

    # How often it is written which keys were used.
    last_use_interval: float = Field(default=60.0, gt=0)


class SessionSettings(BaseSettings):
    """Browsers that signed in with a key."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_SESSIONS_", populate_by_name=True)

    # From the sign-in on; a session never outlives its key.
    lifetime: int = Field(default=7 * 86_400, ge=60, le=90 * 86_400)
    # The oldest of a key's sessions makes room for the newest.
    most_per_key: int = Field(default=50, ge=1, le=1000)
    # Origins that browsers see where a proxy hands on another host: https://..., by commas.
    origins_text: str = Field(default="", validation_alias="OCTRAIN_SESSIONS_ORIGINS")

    @cached_property
    def origins(self) -> frozenset[str]:
        """The origins that count as this service's own."""
        parts = (part.strip().rstrip("/") for part in self.origins_text.split(","))
        return frozenset(part.lower() for part in parts if part)

    @field_validator("origins_text")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for part in (part.strip() for part in text.split(",")):
            if part and not re.fullmatch(r"https?://[^/?#@\s]+/?", part):
                raise ValueError(f"{part!r} is not an origin like https://octrain.example.com")
        return text


class DashboardSettings(BaseSettings):
    """The dashboard's files."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_DASHBOARD_")

    # A build to serve in place of the one that comes with the package or lies in the checkout.
    folder: DirectoryPath | None = None


class RateLimitSettings(BaseSettings):
    """Requests that one key may send in `window` seconds; 0 is no limit."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_RATE_LIMIT_")

    window: int = Field(default=60, ge=1, le=86_400)
    read: int = Field(default=30_000, ge=0)
    write: int = Field(default=6_000, ge=0)
    # All requests of one node.
    worker: int = Field(default=60_000, ge=0)
    # Requests without a valid key, of one address, by each API process.
    address: int = Field(default=600, ge=0)
    # Sign-ins of one address, right or wrong, by each API process.
    sign_in: int = Field(default=60, ge=0)


class JobSecretSettings(BaseSettings):
    """Which secrets jobs may name. Only names are known here: nodes hold the values."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_")

    # The owners who may use each name, "*" for everybody: JSON, {"hub-token": ["ada"]}.
    job_secrets: dict[str, list[str]] = Field(default_factory=dict)

    def allows(self, name: str, owner: str) -> bool:
        """Whether this owner's jobs may use the secret of this name."""
        return bool({owner, "*"} & set(self.job_secrets.get(name, ())))


class QuotaSettings(BaseSettings):
    """What each owner may use, unless an administrator gave them other quotas; none: no limit."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_QUOTA_")

    queued: int | None = Field(default=None, ge=0)
    running: int | None = Field(default=None, ge=0)
    gpu_hours: float | None = Field(default=None, ge=0)
    # GPU-hours of so many days, today included.
    window_days: int = Field(default=30, ge=1, le=366)


class PrometheusSettings(BaseSettings):
    """Who may read `/metrics`."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_PROMETHEUS_")

    access: Literal["admin", "open"] = "admin"


class TracingSettings(BaseSettings):
    """Where traces go: the URL of an OTLP/HTTP receiver, `http://collector:4318/v1/traces`."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_TRACING_")

    endpoint: str | None = None
    # The share of requests traced; a caller's own decision goes before it.
    sample: float = Field(default=1.0, ge=0, le=1)


class LogSettings(BaseSettings):
    """What is logged, and in which form."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_LOG_")

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # A line for every request, for those that were refused or failed, or for none.
    requests: Literal["all", "errors", "none"] = "errors"


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
    # The most that one tick places. More of them make a tick longer and each placement hardly
    # cheaper (`benchmarks/scheduler.py`).
    batch: int = Field(default=50, ge=1, le=1000)
    # What queued jobs wait for is stated when it changes, and anew at least this often.
    refresh: float = Field(default=10.0, ge=0)
    # A job of several GPUs that has waited this long has a node kept free for it.
    reserve_after: float = Field(default=120.0, ge=0)
    # So many faults in a row, of different jobs within the window, set a node aside; 0 never does.
    fault_limit: int = Field(default=3, ge=0)
    fault_window: int = Field(default=3600, ge=1)


class WebhookSettings(BaseSettings):
    """Where webhooks may go, and how hard their delivery is tried."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_WEBHOOK_", populate_by_name=True)

    # Addresses that are not of the public internet, but may be delivered to: CIDR, by commas.
    allowed_networks_text: str = Field(
        default="", validation_alias="OCTRAIN_WEBHOOK_ALLOWED_NETWORKS"
    )
    allow_http: bool = False
    # PEM file of certificate authorities to trust in place of the system's.
    ca_file: FilePath | None = None
    most_per_owner: int = Field(default=50, ge=1)
    # From the first look at DNS to the status line of the answer.
    timeout: float = Field(default=15.0, gt=0, le=120)
    # Deliveries at one time: of all endpoints, half of them for those that fail now; and of one.
    concurrency: int = Field(default=64, ge=2, le=1000)
    concurrency_per_endpoint: int = Field(default=4, ge=1, le=100)
    # The pause after the first failure; each further one is four times as long.
    retry_first: float = Field(default=5.0, gt=0)
    retry_longest: float = Field(default=12 * 3600.0, gt=0)
    give_up_after: float = Field(default=3 * 86400.0, gt=0)
    # An endpoint that has taken nothing for so long, in so many attempts at least, is disabled.
    disable_after: float = Field(default=5 * 86400.0, gt=0)
    disable_failures: int = Field(default=10, ge=1)
    keep_deliveries: float = Field(default=30 * 86400.0, gt=0)

    @field_validator("allowed_networks_text")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        parse_networks(text)
        return text

    @cached_property
    def allowed_networks(self) -> tuple[Network, ...]:
        """The networks that are allowed beside the public internet."""
        return parse_networks(self.allowed_networks_text)


class MetricSettings(BaseSettings):
    """How long metrics are kept. 0 keeps them for ever."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_METRICS_")

    # Points as they were recorded, in days; and of all jobs together, in bytes as stored.
    raw_days: float = Field(default=0.0, ge=0)
    raw_max_bytes: int = Field(default=0, ge=0)
    # Their rollups; the newest value of each series stays as long as its job.
    rollup_days: float = Field(default=0.0, ge=0)
    sweep_interval: float = Field(default=60.0, gt=0)


class JobLogSettings(BaseSettings):
    """How long the lines of jobs are kept. 0 keeps them as long as their job."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_JOB_LOGS_")

    # In days since they came; and of all jobs together, in bytes of text.
    keep_days: float = Field(default=0.0, ge=0)
    max_bytes: int = Field(default=0, ge=0)
    sweep_interval: float = Field(default=60.0, gt=0)


class NodeMetricSettings(BaseSettings):
    """How long samples of nodes are kept."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_NODE_METRICS_")

    keep_hours: float = Field(default=24.0, gt=0, le=8784)


class DatasetSettings(BaseSettings):
    """What owners may upload, and how long it is kept for them unfinished."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_DATASET_")

    quota_bytes: int = Field(default=100 * 2**30, ge=0)
    most_per_owner: int = Field(default=10_000, ge=1)
    max_bytes: int = Field(default=50 * 2**30, ge=1)
    max_parts: int = Field(default=10_000, ge=1)
    expire_after: float = Field(default=86400.0, gt=0)
    # What the check refused holds no files; its problems can be read for so long.
    keep_invalid: float = Field(default=7 * 86400.0, gt=0)


class Settings(BaseSettings):
    """All settings; each part reads its own variables."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_")

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    broker: BrokerSettings = Field(default_factory=BrokerSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    keys: KeySettings = Field(default_factory=KeySettings)
    sessions: SessionSettings = Field(default_factory=SessionSettings)
    dashboard: DashboardSettings = Field(default_factory=DashboardSettings)
    rate_limits: RateLimitSettings = Field(default_factory=RateLimitSettings)
    secrets: JobSecretSettings = Field(default_factory=JobSecretSettings)
    quotas: QuotaSettings = Field(default_factory=QuotaSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    prometheus: PrometheusSettings = Field(default_factory=PrometheusSettings)
    logs: LogSettings = Field(default_factory=LogSettings)
    controller: ControllerSettings = Field(default_factory=ControllerSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    node_metrics: NodeMetricSettings = Field(default_factory=NodeMetricSettings)
    metrics: MetricSettings = Field(default_factory=MetricSettings)
    job_logs: JobLogSettings = Field(default_factory=JobLogSettings)
    webhooks: WebhookSettings = Field(default_factory=WebhookSettings)
    datasets: DatasetSettings = Field(default_factory=DatasetSettings)
