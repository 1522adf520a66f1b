"""Webhooks as they are asked for and shown."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from octrain_api.pagination import Page
from octrain_api.times import WrittenTime
from octrain_api.webhooks.messages import PATTERN_TOLD, pattern_problem

DeliveryStatus = Literal["pending", "delivered", "failed"]

_NO_NUL = r"^[^\x00]*$"
_DAY = 86400


def _known(pattern: str) -> str:
    problem = pattern_problem(pattern)
    if problem is not None:
        raise ValueError(problem)
    return pattern


Url = Annotated[str, Field(min_length=1, max_length=2048, pattern=_NO_NUL)]
Description = Annotated[str, Field(max_length=500, pattern=_NO_NUL)]
EventFilter = Annotated[
    list[
        Annotated[
            str,
            Field(max_length=100, json_schema_extra={"pattern": PATTERN_TOLD}),
            AfterValidator(_known),
        ]
    ],
    Field(
        min_length=1,
        max_length=50,
        description="types of events: `job.<status>`, `job.event.<kind>`, `job.event.*`, `job.*`",
    ),
]
LabelFilter = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64, pattern=_NO_NUL)],
        Annotated[str, Field(max_length=256, pattern=_NO_NUL)],
    ],
    Field(
        max_length=32,
        description="only events of jobs that have all of these labels",
        json_schema_extra={"additionalProperties": False},
    ),
]

EXAMPLE: dict[str, Any] = {
    "url": "https://ci.example.com/hooks/octrain",
    "description": "tells the release pipeline",
    "events": ["job.succeeded", "job.failed"],
    "labels": {"team": "nlp"},
}


class WebhookRequest(BaseModel):
    """A new endpoint for events of one's own jobs."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [EXAMPLE]})

    url: Url
    description: Description = ""
    events: EventFilter = Field(default_factory=lambda: ["job.*"])
    labels: LabelFilter = {}
    active: bool = Field(default=True, strict=True)


class WebhookChanges(BaseModel):
    """What is to be changed; what is left out stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"events": ["job.*"], "active": True}]}
    )

    url: Url | None = None
    description: Description | None = None
    events: EventFilter | None = None
    labels: LabelFilter | None = None
    active: bool | None = Field(
        strict=True, default=None, description="true also takes back that the service disabled it"
    )


class SecretRotation(BaseModel):
    """How long the former secret goes on signing beside the new one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})

    keep_seconds: int = Field(
        strict=True,
        default=_DAY,
        ge=0,
        le=30 * _DAY,
        description="0: the former secret ends now, for leaks",
    )


class RedeliverRequest(BaseModel):
    """Which failed deliveries are to be tried again: those created in this window."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"since": "2026-01-31T00:00:00Z"}]}
    )

    since: WrittenTime
    until: WrittenTime | None = None


class WebhookObject(BaseModel):
    """An endpoint without its secrets."""

    id: str
    owner: str
    url: str
    description: str
    events: list[str]
    labels: dict[str, str]
    active: bool = Field(description="as its owner wants it")
    created_at: datetime
    last_success_at: datetime | None
    failing_since: datetime | None = Field(description="it has taken nothing since then")
    failures: int = Field(description="failed attempts since its last success")
    not_before: datetime | None = Field(description="it asked for a pause until then")
    disabled_at: datetime | None = Field(description="when the service stopped sending to it")
    disabled_reason: str | None
    old_secret_until: datetime | None = Field(
        description="until when deliveries are also signed with a former secret"
    )


class NewWebhookObject(WebhookObject):
    """The only answers that hold a secret: of the creation and of a rotation."""

    secret: str = Field(description="`whsec_...`: verify signatures with it")


class WebhookList(Page):
    """One page of endpoints, newest first."""

    items: list[WebhookObject]


class AttemptObject(BaseModel):
    """One try to deliver."""

    number: int
    started_at: datetime
    duration_ms: int = Field(description="from the look at DNS to the status line")
    status_code: int | None = Field(description="null when no answer came")
    error: str | None
    response_excerpt: str = Field(description="the first 2048 bytes of the answer's body")


class DeliveryObject(BaseModel):
    """A message for an endpoint, and what came of it."""

    id: str
    webhook_id: str
    message_id: str = Field(description="the header webhook-id, the same in every attempt")
    type: str
    job_id: str | None = Field(description="null for a test call")
    event_seq: int | None
    status: DeliveryStatus
    detail: str | None = Field(description="why it was given up")
    created_at: datetime
    next_attempt_at: datetime | None
    ended_at: datetime | None
    attempt_count: int
    attempts: list[AttemptObject] = Field(description="the newest 20, oldest of them first")


class DeliveryDetail(DeliveryObject):
    """A delivery with the body that is sent."""

    payload: dict[str, Any]


class DeliveryList(Page):
    """One page of deliveries, newest first."""

    items: list[DeliveryObject]


class Requeued(BaseModel):
    """How many deliveries are tried again."""

    count: int
