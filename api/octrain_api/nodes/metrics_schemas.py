"""What a node's GPUs and its host do, as the node tells it and as readers see it."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


class HostUse(BaseModel):
    """The whole machine: processors, 0 to 1, and memory in use. What is unknown is left out."""

    cpu_utilization: Share | None = None
    memory_bytes: Amount | None = None


class GpuUse(BaseModel):
    """One GPU by its index on the node. What it cannot tell is left out, never zero."""

    index: int = Field(ge=0, le=4096)
    utilization: Share | None = Field(default=None, description="mean since the sample before")
    memory_bytes: Amount | None = None
    power_watts: Amount | None = None
    temperature_celsius: float | None = Field(default=None, ge=-300, le=1000)


class SampleIn(BaseModel):
    """One sample of a node; the same `id` again is the same sample."""

    id: Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9-]+$")]
    age_seconds: float = Field(ge=0, le=31_622_400, allow_inf_nan=False)
    host: HostUse = HostUse()
    gpus: list[GpuUse] = Field(default=[], max_length=1024)


class SamplesRequest(BaseModel):
    """Samples of a node, oldest first."""

    samples: list[SampleIn] = Field(max_length=360)


class SamplesAnswer(BaseModel):
    """The samples are stored."""

    stored: int = Field(description="how many of them were new")


class Sample(BaseModel):
    """What a node did at a time, or on average up to it."""

    time: datetime
    host: HostUse
    gpus: list[GpuUse]


class NodeMetrics(BaseModel):
    """Samples of a node, oldest first."""

    node_id: str
    samples: list[Sample]
