"""Recipes, keys, webhooks, quotas and audit entries as the server tells them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from octrain.client.models import Answer


class Recipe(Answer):
    """A named recipe in one version; ``fragment`` is the parts of a spec that it stands for."""

    name: str
    version: int = 1
    preset: bool = False
    owner: str | None = None
    title: str | None = None
    description: str = ""
    needs: str | None = None
    fragment: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime | None = None


class ApiKey(Answer):
    """An API key without its secret."""

    id: str
    name: str = ""
    owner: str = ""
    scopes: list[str] = Field(default_factory=list)
    node: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    previous_until: datetime | None = None


class NewApiKey(ApiKey):
    """A key with its secret, which the server never tells again (and ``repr`` leaves out)."""

    key: str = Field(repr=False)


class EnrolmentToken(Answer):
    """A one-time token with which a machine gets the key of its node; ``token`` is told once."""

    id: str
    owner: str = ""
    node: str | None = None
    expires_at: datetime | None = None
    used_at: datetime | None = None
    key_id: str | None = None
    token: str | None = Field(default=None, repr=False)


class Webhook(Answer):
    """An endpoint that is told of events of one's own jobs."""

    id: str
    url: str
    description: str = ""
    events: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    active: bool = True
    created_at: datetime | None = None
    last_success_at: datetime | None = None
    failing_since: datetime | None = None
    failures: int = 0
    disabled_at: datetime | None = None
    disabled_reason: str | None = None


class NewWebhook(Webhook):
    """A webhook with the secret that verifies its calls, told only now."""

    secret: str = Field(repr=False)


class Delivery(Answer):
    """A message for a webhook, and what came of it."""

    id: str
    webhook_id: str = ""
    message_id: str = ""
    type: str = ""
    job_id: str | None = None
    status: str = ""
    detail: str | None = None
    created_at: datetime | None = None
    next_attempt_at: datetime | None = None
    attempt_count: int = 0
    attempts: list[dict[str, Any]] = Field(default_factory=list)


class Quotas(Answer):
    """What an owner may use at most; None is no limit."""

    owner: str | None = None
    queued: int | None = None
    running: int | None = None
    gpu_hours: float | None = None


class OwnersQuotas(Answer):
    """The quotas of owners who have others than the default."""

    default: Quotas
    items: list[Quotas] = Field(default_factory=list)


class Usage(Answer):
    """What an owner uses now, and has used within the last ``window_days``."""

    owner: str = ""
    queued: int = 0
    running: int = 0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    attempts: int = 0
    window_days: int = 0
    quotas: Quotas = Field(default_factory=Quotas)


class AuditEntry(Answer):
    """One change, or the refusal of one."""

    id: int
    time: datetime
    key_id: str = ""
    owner: str = ""
    address: str | None = None
    method: str = ""
    route: str = ""
    target: str | None = None
    status: int = 0
    outcome: str = ""
