"""Nodes, and what they measured of themselves."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class Node(Base):
    """A machine that runs attempts, as its worker last registered it."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str]
    boot_id: Mapped[str]
    hostname: Mapped[str]
    version: Mapped[str]
    device_kinds: Mapped[list[str]]
    cpu_slots: Mapped[int]
    gpus: Mapped[list[Json]] = mapped_column(JSONB)
    engines: Mapped[Json]
    roots: Mapped[list[str]]
    private_roots: Mapped[bool]
    artifact_url: Mapped[str | None]
    wanted: Mapped[str] = mapped_column(server_default="run")
    registered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())
    unreachable_since: Mapped[datetime | None]
    # When the columns above were last written: whoever keeps them in memory compares this.
    described_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Set aside for repeated faults, until an administrator releases it.
    quarantined_since: Mapped[datetime | None]
    quarantine_detail: Mapped[str | None]
    faults_from: Mapped[datetime | None]


class NodeSample(Base):
    """What a node's GPUs and its host did at a time. Old ones go as new ones come."""

    __tablename__ = "node_samples"

    node_id: Mapped[str] = mapped_column(
        ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    host: Mapped[Json]
    gpus: Mapped[list[Json]] = mapped_column(JSONB)

    __table_args__ = (Index("ix_node_samples_time", "node_id", "time"),)


class GpuActivity(Base):
    """Until when the GPUs of an attempt were seen, and when one was last seen at work."""

    __tablename__ = "gpu_activity"

    attempt_id: Mapped[str] = mapped_column(
        ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True
    )
    seen_at: Mapped[datetime]
    busy_at: Mapped[datetime]
