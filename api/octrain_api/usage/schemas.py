"""Quotas and use as they are set and shown."""

from pydantic import BaseModel, ConfigDict, Field

# What the columns hold.
_MOST_JOBS = 2**31 - 1


class Quotas(BaseModel):
    """What an owner may use at most; null is no limit."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"queued": 100, "running": 8, "gpu_hours": 500}]},
    )

    queued: int | None = Field(
        default=None, ge=0, le=_MOST_JOBS, strict=True, description="jobs that wait in the queue"
    )
    running: int | None = Field(
        default=None,
        ge=0,
        le=_MOST_JOBS,
        strict=True,
        description="jobs that hold a place on a node",
    )
    gpu_hours: float | None = Field(
        default=None,
        ge=0,
        strict=True,
        allow_inf_nan=False,
        description="GPU-hours within the window",
    )


class OwnerQuotas(Quotas):
    """The quotas that an administrator gave one owner, in place of the settings' default."""

    owner: str


class OwnerQuotasList(BaseModel):
    """Every owner with quotas of their own, by name."""

    default: Quotas = Field(description="of every other owner, from the settings")
    items: list[OwnerQuotas]


class UsageObject(BaseModel):
    """What an owner uses now, and has used within the window."""

    owner: str
    queued: int
    running: int
    gpu_hours: float = Field(description="from claim to end, times the GPUs held; live jobs too")
    cpu_hours: float = Field(description="the same of CPU slots; not limited")
    attempts: int = Field(description="runs that have ended within the window")
    window_days: int = Field(description="counted on the day of a run's end, UTC")
    quotas: Quotas
