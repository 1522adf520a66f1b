"""What users do with webhooks: make, change, rotate, test, and look at or repeat deliveries."""

import json
import re
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import Principal
from octrain_api.database import database_now, lock_name
from octrain_api.ids import new_id
from octrain_api.models import Webhook, WebhookAttempt, WebhookDelivery
from octrain_api.pagination import cut, decode_cursor, encode_cursor
from octrain_api.problems import Problem, ProblemError, conflict, not_found
from octrain_api.settings import WebhookSettings
from octrain_api.webhooks.addresses import is_allowed
from octrain_api.webhooks.messages import TEST_TYPE, test_body
from octrain_api.webhooks.repository import (
    QUEUED_NOW,
    DeliveryRepository,
    WebhookRepository,
    notify_deliveries,
)
from octrain_api.webhooks.schemas import (
    AttemptObject,
    DeliveryDetail,
    DeliveryList,
    DeliveryObject,
    NewWebhookObject,
    RedeliverRequest,
    WebhookChanges,
    WebhookList,
    WebhookObject,
    WebhookRequest,
)
from octrain_api.webhooks.signing import new_secret

_MOST_OLD_SECRETS = 4
# RFC 1123 2.1 and RFC 1035 2.3.4, with the underscore that some names have.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\.?$){_LABEL}(?:\.{_LABEL})*\.?")


class WebhookService:
    """One owner's endpoints, or every owner's for an administrator."""

    def __init__(
        self, session: AsyncSession, settings: WebhookSettings, principal: Principal
    ) -> None:
        self._session = session
        self._settings = settings
        self._principal = principal
        self._webhooks = WebhookRepository(session)
        self._deliveries = DeliveryRepository(session)

    async def create(self, request: WebhookRequest) -> NewWebhookObject:
        """Make an endpoint; the answer is the only one that shows its secret."""
        owner = self._principal.owner
        self._check_url(request.url)
        await lock_name(self._session, f"webhooks {owner}")
        most = self._settings.most_per_owner
        if await self._webhooks.count(owner) >= most:
            raise conflict("too-many-webhooks", f"An owner has {most} webhooks at most.")
        webhook = Webhook(id=new_id("wh"), owner=owner, secret=new_secret(), **request.model_dump())
        await self._webhooks.add(webhook)
        return self._with_secret(webhook)

    async def list_page(self, limit: int, cursor: str | None) -> WebhookList:
        """One page, newest first."""
        after = decode_cursor(cursor) if cursor is not None else None
        rows = await self._webhooks.page(self._principal.visible_owner, limit + 1, after)
        page = rows[:limit]
        last = encode_cursor(page[-1].created_at, page[-1].id) if cut(rows, limit) else None
        return WebhookList(items=[_webhook_object(row) for row in page], next_cursor=last)

    async def get(self, webhook_id: str) -> WebhookObject:
        """One endpoint."""
        return _webhook_object(await self._find(webhook_id))

    async def get_with_secret(self, webhook_id: str) -> NewWebhookObject:
        """One endpoint as its maker saw it."""
        return self._with_secret(await self._find(webhook_id))

    async def change(self, webhook_id: str, changes: WebhookChanges) -> WebhookObject:
        """Change what was sent; `active` true also takes back that the service disabled it."""
        webhook = await self._find(webhook_id, lock=True)
        wanted = changes.model_dump(exclude_none=True)
        if "url" in wanted:
            self._check_url(wanted["url"])
        for name, value in wanted.items():
            setattr(webhook, name, value)
        if "url" in wanted or wanted.get("active"):
            # It is given a new chance: what it did before says nothing of what it does now.
            webhook.failing_since, webhook.failures, webhook.not_before = None, 0, None
        if wanted.get("active"):
            webhook.disabled_at = webhook.disabled_reason = None
        await self._session.flush()
        await notify_deliveries(self._session)
        return _webhook_object(webhook)

    async def remove(self, webhook_id: str) -> None:
        """Delete an endpoint with its log; what is being sent at this moment may still arrive."""
        await self._webhooks.remove(await self._find(webhook_id, lock=True))

    async def rotate(self, webhook_id: str, keep_seconds: int) -> NewWebhookObject:
        """Give the endpoint a new secret; the former one signs too for `keep_seconds`."""
        webhook = await self._find(webhook_id, lock=True)
        now = await database_now(self._session)
        until = (now + timedelta(seconds=keep_seconds)).isoformat()
        former = {"secret": webhook.secret, "until": until}
        # Who says 0 has lost a secret; which one of them, nobody knows.
        kept = [former, *webhook.old_secrets][:_MOST_OLD_SECRETS] if keep_seconds else []
        webhook.old_secrets = kept
        webhook.secret = new_secret()
        await self._session.flush()
        return self._with_secret(webhook)

    async def test(self, webhook_id: str) -> DeliveryDetail:
        """Queue a test call: tried once, whatever the state of the endpoint."""
        webhook = await self._find(webhook_id)
        delivery = WebhookDelivery(
            id=new_id("whd"),
            webhook_id=webhook.id,
            message_id=new_id("msg"),
            type=TEST_TYPE,
            body=test_body(await database_now(self._session)),
        )
        await self._deliveries.add(delivery)
        await notify_deliveries(self._session)
        return _detail(delivery, [])

    async def list_deliveries(
        self, webhook_id: str, status: str | None, limit: int, cursor: str | None
    ) -> DeliveryList:
        """One page of the delivery log, newest first."""
        await self._find(webhook_id)
        after = decode_cursor(cursor) if cursor is not None else None
        rows = await self._deliveries.page(webhook_id, status, limit + 1, after)
        page = rows[:limit]
        last = encode_cursor(page[-1].created_at, page[-1].id) if cut(rows, limit) else None
        attempts = await self._deliveries.attempts([row.id for row in page])
        items = [DeliveryObject(**_fields(row, attempts.get(row.id, []))) for row in page]
        return DeliveryList(items=items, next_cursor=last)

    async def delivery(self, webhook_id: str, delivery_id: str) -> DeliveryDetail:
        """One delivery with its body."""
        await self._find(webhook_id)
        delivery = await self._deliveries.get(webhook_id, delivery_id)
        if delivery is None:
            raise not_found("delivery", delivery_id)
        attempts = await self._deliveries.attempts([delivery.id])
        return _detail(delivery, attempts.get(delivery.id, []))

    async def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryDetail:
        """Send a message again, under its old id; tried as often as a new one."""
        webhook = await self._find(webhook_id, lock=True)
        delivery = await self._deliveries.get(webhook_id, delivery_id, lock=True)
        if delivery is None:
            raise not_found("delivery", delivery_id)
        if delivery.type != TEST_TYPE:
            self._check_takes(webhook)
        now = await database_now(self._session)
        if delivery.claimed_until is not None and delivery.claimed_until > now:
            raise conflict("delivery-in-flight", "This delivery is being sent right now.")
        for name, value in QUEUED_NOW.items():
            setattr(delivery, name, value)
        await self._session.flush()
        await self._session.refresh(delivery)
        await notify_deliveries(self._session)
        attempts = await self._deliveries.attempts([delivery.id])
        return _detail(delivery, attempts.get(delivery.id, []))

    async def redeliver_failed(self, webhook_id: str, request: RedeliverRequest) -> int:
        """Send every failed message of a window again; how many (10,000 at most in one call)."""
        for name, moment in (("since", request.since), ("until", request.until)):
            if moment is not None and moment.tzinfo is None:
                raise _refuse(f"/{name}", f"{name} needs a time zone, such as Z", "timezone")
        self._check_takes(await self._find(webhook_id, lock=True))
        count = await self._deliveries.requeue_failed(webhook_id, request.since, request.until)
        await notify_deliveries(self._session)
        return count

    async def _find(self, webhook_id: str, *, lock: bool = False) -> Webhook:
        owner = self._principal.visible_owner
        webhook = await self._webhooks.get(webhook_id, owner, lock=lock)
        if webhook is None:
            raise not_found("webhook", webhook_id)
        return webhook

    @staticmethod
    def _check_takes(webhook: Webhook) -> None:
        if webhook.disabled_at is not None or not webhook.active:
            why = webhook.disabled_reason or "its owner switched it off"
            raise conflict(
                "webhook-disabled",
                f"Nothing is sent to this webhook ({why}). PATCH it with active: true first.",
            )

    def _check_url(self, text: str) -> None:
        problem = _url_problem(text, self._settings)
        if problem is not None:
            raise _refuse("/url", problem, "url")

    @staticmethod
    def _with_secret(webhook: Webhook) -> NewWebhookObject:
        return NewWebhookObject(**_webhook_object(webhook).model_dump(), secret=webhook.secret)


def _refuse(pointer: str, message: str, code: str) -> Problem:
    error = ProblemError(pointer=pointer, message=message, code=code)
    return Problem(422, "request-invalid", "Request not valid", message, errors=[error])


def _url_problem(text: str, settings: WebhookSettings) -> str | None:
    """What can be seen of a URL without asking DNS: that is asked at each delivery."""
    try:
        url = httpx.URL(text)
        # Both are judged when they are asked for only.
        host, port = url.host, url.port
    except (httpx.InvalidURL, ValueError) as error:
        return f"this is not a URL: {error}"
    if url.scheme == "http" and not settings.allow_http:
        return "http:// is not allowed by this server; use https://"
    if url.scheme not in ("http", "https"):
        return "the URL must begin with https://"
    if not host:
        return "the URL names no host"
    if url.userinfo:
        return "the URL must hold no user name or password: verify the signature instead"
    if url.fragment:
        return "the URL must have no #fragment: it would not be sent"
    if port is not None and not 0 < port < 65536:
        return "the URL's port must be 1 to 65535"
    try:
        ip_address(host)
    except ValueError:
        if _NAME.fullmatch(url.raw_host.decode("ascii")) is None:
            return "the URL's host is no name that DNS could know"
        return None
    if not is_allowed(host, settings.allowed_networks):
        return "this is not a public address, and this server allows no other"
    return None


def _webhook_object(row: Webhook) -> WebhookObject:
    return WebhookObject(
        id=row.id,
        owner=row.owner,
        url=row.url,
        description=row.description,
        events=row.events,
        labels=row.labels,
        active=row.active,
        created_at=row.created_at,
        last_success_at=row.last_success_at,
        failing_since=row.failing_since,
        failures=row.failures,
        not_before=row.not_before,
        disabled_at=row.disabled_at,
        disabled_reason=row.disabled_reason,
        old_secret_until=max((old["until"] for old in row.old_secrets), default=None),
    )


def _fields(row: WebhookDelivery, attempts: list[WebhookAttempt]) -> dict[str, Any]:
    return {
        "id": row.id,
        "webhook_id": row.webhook_id,
        "message_id": row.message_id,
        "type": row.type,
        "job_id": row.job_id,
        "event_seq": row.event_seq,
        "status": row.status,
        "detail": row.detail,
        "created_at": row.created_at,
        "next_attempt_at": row.next_attempt_at,
        "ended_at": row.ended_at,
        "attempt_count": row.attempts,
        "attempts": [
            AttemptObject(
                number=attempt.number,
                started_at=attempt.started_at,
                duration_ms=attempt.duration_ms,
                status_code=attempt.status_code,
                error=attempt.error,
                response_excerpt=attempt.response_excerpt,
            )
            for attempt in attempts
        ],
    }


def _detail(row: WebhookDelivery, attempts: list[WebhookAttempt]) -> DeliveryDetail:
    return DeliveryDetail(**_fields(row, attempts), payload=json.loads(row.body))
