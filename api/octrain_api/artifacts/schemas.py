"""What readers see of artifacts."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field


class FileObject(BaseModel):
    """One file of an artifact."""

    path: str
    size: int
    sha256: str


class ArtifactObject(BaseModel):
    """Files that an attempt made."""

    id: str
    job_id: str
    attempt: int
    kind: str = Field(description="checkpoint, model, report, conversion, log or telemetry")
    name: str
    step: int | None
    best: bool
    size: int = Field(description="bytes of all its files")
    sha256: str | None = Field(description="of its only file; null when there are several")
    files: list[FileObject]
    url: str
    created_at: datetime


class ArtifactList(BaseModel):
    """The artifacts of a job, oldest first."""

    items: list[ArtifactObject]


class ConversionReport(BaseModel):
    """What was converted and what was not, and why: one row for every linear and norm layer."""

    attempt: int
    rows: list[dict[str, Any]]


class PrecisionTable(BaseModel):
    """The precision table of the method, as the newest attempt measured it on its first step.

    `rows` has `gemm_compute` (per kind of layer the formats of both operands of fprop, dgrad and
    wgrad), `attention_compute` (those in which attention multiplies, by pass), `communication`,
    `weights`, `master_weights`, `weight_gradients` and `optimizer_states`: bytes and elements by
    format.
    """

    attempt: int
    step: int
    engine: str
    rows: dict[str, Any]
    engine_state: dict[str, Any] = Field(description="FP8 histories and scales, by format")
