"""What a node is told by its environment and its command line, grouped by concern.

Every variable begins with ``OCTRAIN_``, but ``REDIS_URL`` keeps the name that Celery's users know.
The command line of ``python -m octrain_worker`` wins over the environment; the agent hands what it
settled on to its supervisors through their environment.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from octrain_worker.supervisor.log_files import SMALLEST_LIMIT

__all__ = [
    "ApiSettings",
    "BrokerSettings",
    "NodeSettings",
    "StorageSettings",
    "SupervisorSettings",
    "TracingSettings",
    "TrainerSettings",
    "WorkerSettings",
]


class ApiSettings(BaseSettings):
    """Where the API is, and the key of this node (scope ``node``)."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_", extra="ignore", frozen=True)

    api_url: str = "http://127.0.0.1:8000"
    node_key: SecretStr = SecretStr("")
    # A one-time token that the node exchanges for its key: see octrain_worker.enrolment.
    node_token: SecretStr = SecretStr("")
    # PEM file of certificate authorities to trust beside the system's, of the API and the broker.
    ca_file: Path | None = None


class BrokerSettings(BaseSettings):
    """The Redis or Valkey server that Celery's messages come through."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True)

    redis_url: str = "redis://127.0.0.1:6379/0"


class NodeSettings(BaseSettings):
    """This node: its name, its local folder and what it offers."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_WORKER_", extra="ignore", frozen=True)

    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=200)
    data_dir: Path = Path("~/.local/share/octrain/worker")
    # None: one on a node without GPUs, none on a node with them.
    cpu_slots: int | None = Field(default=None, ge=0, le=1024)
    # Whether a trainer is kept with its libraries imported, so that a job starts at once.
    spare_trainer: bool = True
    # Seconds between the hand-over of a spare and the start of the next: its imports would
    # otherwise compete with the first steps of the job that took it.
    spare_delay_seconds: float = Field(default=10.0, ge=0)
    # Seconds between two samples of the node's GPUs, processors and memory.
    metrics_seconds: float = Field(default=10.0, ge=1, le=60)

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()


class StorageSettings(BaseSettings):
    """Where artifacts go, and what paths a spec may name."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_", extra="ignore", frozen=True)

    # None: a folder of this node, which no other node reaches.
    artifact_url: str | None = None
    roots: Annotated[tuple[Path, ...], NoDecode] = ()
    # Whether the roots and the store are this node's own, so that its jobs restart only here.
    private_roots: bool = False

    @field_validator("roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(Path(part) for part in value.split(os.pathsep) if part)
        return value


class TrainerSettings(BaseSettings):
    """How a trainer is started."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_TRAINER_", extra="ignore", frozen=True)

    # A program that, given the argument ``spare``, reads one JSON line and trains (fp8core's own).
    command: Annotated[tuple[str, ...], NoDecode] = (sys.executable, "-m", "fp8core")
    # Names of environment variables that the trainer may see beside the usual ones.
    environment: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("environment", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value


class SupervisorSettings(BaseSettings):
    """Patience of a supervisor, in seconds."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_SUPERVISOR_", extra="ignore", frozen=True)

    # How long an attempt is tried to be claimed while the API is away.
    claim_patience_seconds: float = Field(default=120.0, gt=0)
    # From the node's shutdown to SIGKILL of a trainer that has not saved and ended.
    shutdown_grace_seconds: float = Field(default=5.0, gt=0)
    # How long a checkpoint or model is tried to be fetched while the store does not answer.
    fetch_patience_seconds: float = Field(default=300.0, gt=0)
    # How long a result is tried to be copied to the artifact store after the trainer ended.
    upload_patience_seconds: float = Field(default=600.0, gt=0)
    # What stdout and stderr of a trainer may take of this node's disk, each.
    log_bytes: int = Field(default=64 << 20, ge=SMALLEST_LIMIT)
    # From SIGTERM to SIGKILL of processes that the trainer left behind.
    leftover_grace_seconds: float = Field(default=2.0, ge=0)


class TracingSettings(BaseSettings):
    """Where traces go: the URL of an OTLP/HTTP receiver, as the API's setting of that name."""

    model_config = SettingsConfigDict(env_prefix="OCTRAIN_TRACING_", extra="ignore", frozen=True)

    endpoint: str | None = None


@dataclass(frozen=True)
class WorkerSettings:
    """All of the above."""

    api: ApiSettings = field(default_factory=ApiSettings)
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    node: NodeSettings = field(default_factory=NodeSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)

    @property
    def artifact_url(self) -> str:
        return self.storage.artifact_url or (self.node.data_dir / "artifacts").as_uri()

    @property
    def private_storage(self) -> bool:
        return self.storage.private_roots or self.storage.artifact_url is None

    @property
    def attempts_folder(self) -> Path:
        return self.node.data_dir / "attempts"

    @property
    def node_metrics_file(self) -> Path:
        """The newest sample of the node: written by the agent, read by supervisors."""
        return self.node.data_dir / "node_metrics.json"

    @property
    def spares_folder(self) -> Path:
        return self.node.data_dir / "spares"

    def environment(self) -> dict[str, str]:
        """This process's environment with these settings in it, for a supervisor to start with."""
        return {
            **os.environ,
            "OCTRAIN_API_URL": self.api.api_url,
            "OCTRAIN_NODE_KEY": self.api.node_key.get_secret_value(),
            "OCTRAIN_WORKER_DATA_DIR": str(self.node.data_dir),
            "OCTRAIN_ARTIFACT_URL": self.artifact_url,
            "OCTRAIN_ROOTS": os.pathsep.join(str(root) for root in self.storage.roots),
            "OCTRAIN_TRAINER_COMMAND": shlex.join(self.trainer.command),
            "OCTRAIN_TRAINER_ENVIRONMENT": ",".join(self.trainer.environment),
        }
