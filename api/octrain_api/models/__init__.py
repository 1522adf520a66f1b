"""The tables, by room. Alembic's migrations make them; `alembic check` holds the two together."""

from octrain_api.models.artifacts import Artifact, Leftover
from octrain_api.models.base import Base, Json, fencing_tokens
from octrain_api.models.datasets import Dataset, DatasetPart
from octrain_api.models.idempotency import IdempotencyKey
from octrain_api.models.jobs import Attempt, Event, Job, Outbox, QueueGroup
from octrain_api.models.keys import (
    ApiKey,
    AuditEntry,
    EnrolmentToken,
    KeySession,
    OwnerQuota,
    RateBucket,
    UsageDay,
)
from octrain_api.models.metrics import (
    LogChunk,
    MetricBatch,
    MetricBlock,
    MetricLayout,
    MetricRollup,
    MetricSeries,
)
from octrain_api.models.nodes import GpuActivity, Node, NodeSample
from octrain_api.models.plans import PlanRequest
from octrain_api.models.recipes import RecipeVersion
from octrain_api.models.service import ServiceClock, ServiceCounter
from octrain_api.models.webhooks import Webhook, WebhookAttempt, WebhookDelivery, WebhookOutbox

__all__ = [
    "ApiKey",
    "Artifact",
    "Attempt",
    "AuditEntry",
    "Base",
    "Dataset",
    "DatasetPart",
    "EnrolmentToken",
    "Event",
    "GpuActivity",
    "IdempotencyKey",
    "Job",
    "Json",
    "KeySession",
    "Leftover",
    "LogChunk",
    "MetricBatch",
    "MetricBlock",
    "MetricLayout",
    "MetricRollup",
    "MetricSeries",
    "Node",
    "NodeSample",
    "Outbox",
    "OwnerQuota",
    "PlanRequest",
    "QueueGroup",
    "RateBucket",
    "RecipeVersion",
    "ServiceClock",
    "ServiceCounter",
    "UsageDay",
    "Webhook",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookOutbox",
    "fencing_tokens",
]
