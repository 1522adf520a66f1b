"""The Python client: submit jobs, follow them, fetch what they made.

client = octrain.Client("https://octrain.example", "oct_…")
job = client.jobs.create({"model": {...}, "data": {...}, "recipe": {...}})
job.wait()
job.download("model", "my-model")

``AsyncClient`` is the same for asyncio.
"""

from __future__ import annotations

from octrain.client.async_job import AsyncJob
from octrain.client.async_jobs import AsyncJobs, JobFilters
from octrain.client.clients import AsyncClient, Client
from octrain.client.connection import Connection, find_connection
from octrain.client.datasets import DataProblem, Dataset, DatasetInvalid
from octrain.client.errors import (
    Conflict,
    DownloadDamaged,
    IdempotencyKeyInFlight,
    IdempotencyKeyReused,
    InvalidRequest,
    JobFailed,
    MissingExtra,
    NoCapableNode,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    OctrainError,
    QuotaExceeded,
    RateLimited,
    ScopeMissing,
    SecretShownOnce,
    ServerError,
    ServerUnreachable,
    SpecInvalid,
    TooLarge,
    WaitTimeout,
    WrongStatus,
)
from octrain.client.frames import Metrics
from octrain.client.jobs import Job, Jobs
from octrain.client.logs import LogFilter
from octrain.client.models import (
    Artifact,
    ArtifactFile,
    Attempt,
    CancelResult,
    JobData,
    JobEvent,
    JobPart,
    LogLine,
    MetricValue,
    Node,
    NodeSample,
    Problem,
    Progress,
    Readiness,
    StreamEvent,
    ValidationReport,
)
from octrain.client.records import (
    ApiKey,
    AuditEntry,
    Delivery,
    EnrolmentToken,
    NewApiKey,
    NewWebhook,
    OwnersQuotas,
    Quotas,
    Recipe,
    Usage,
    Webhook,
)
from octrain.client.series import Series

__all__ = [
    "ApiKey",
    "Artifact",
    "ArtifactFile",
    "AsyncClient",
    "AsyncJob",
    "AsyncJobs",
    "Attempt",
    "AuditEntry",
    "CancelResult",
    "Client",
    "Conflict",
    "Connection",
    "DataProblem",
    "Dataset",
    "DatasetInvalid",
    "Delivery",
    "DownloadDamaged",
    "EnrolmentToken",
    "IdempotencyKeyInFlight",
    "IdempotencyKeyReused",
    "InvalidRequest",
    "Job",
    "JobData",
    "JobEvent",
    "JobFailed",
    "JobFilters",
    "JobPart",
    "Jobs",
    "LogFilter",
    "LogLine",
    "MetricValue",
    "Metrics",
    "MissingExtra",
    "NewApiKey",
    "NewWebhook",
    "NoCapableNode",
    "Node",
    "NodeSample",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "OctrainError",
    "OwnersQuotas",
    "Problem",
    "Progress",
    "QuotaExceeded",
    "Quotas",
    "RateLimited",
    "Readiness",
    "Recipe",
    "ScopeMissing",
    "SecretShownOnce",
    "Series",
    "ServerError",
    "ServerUnreachable",
    "SpecInvalid",
    "StreamEvent",
    "TooLarge",
    "Usage",
    "ValidationReport",
    "WaitTimeout",
    "Webhook",
    "WrongStatus",
    "find_connection",
]
