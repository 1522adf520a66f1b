"""What the service keeps of itself."""

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base


class ServiceClock(Base):
    """When each part of the service was last known to live; the source of downtime."""

    __tablename__ = "service_clocks"

    name: Mapped[str] = mapped_column(primary_key=True)
    alive_at: Mapped[datetime]
    up_since: Mapped[datetime]
    counted_until: Mapped[datetime]


class ServiceCounter(Base):
    """Counters of the controller, which serves no HTTP: the API shows them to Prometheus."""

    __tablename__ = "service_counters"

    name: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
