"""Webhooks and their deliveries in the database, as users ask for them."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.models import Webhook, WebhookAttempt, WebhookDelivery

WEBHOOK_CHANNEL = "octrain_webhook"
_SHOWN_ATTEMPTS = 20
_MOST_REQUEUED = 10_000


async def notify_deliveries(session: AsyncSession) -> None:
    """Wake the delivery loop when this transaction commits."""
    await session.execute(select(func.pg_notify(WEBHOOK_CHANNEL, "")))


class WebhookRepository:
    """Reads, writes and locks endpoints. `owner` None means every owner."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, webhook: Webhook) -> None:
        """Store a new endpoint."""
        self._session.add(webhook)
        await self._session.flush()

    async def count(self, owner: str) -> int:
        """How many endpoints an owner has."""
        statement = select(func.count()).select_from(Webhook).where(Webhook.owner == owner)
        return await self._session.scalar(statement) or 0

    async def get(
        self, webhook_id: str, owner: str | None, *, lock: bool = False
    ) -> Webhook | None:
        """An endpoint, if this owner may see it; with `lock`, its row locked."""
        statement = select(Webhook).where(Webhook.id == webhook_id)
        if owner is not None:
            statement = statement.where(Webhook.owner == owner)
        if lock:
            statement = statement.with_for_update().execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def page(
        self, owner: str | None, limit: int, after: tuple[datetime, str] | None
    ) -> Sequence[Webhook]:
        """Up to `limit` endpoints, newest first, older than the row `after`."""
        statement = (
            select(Webhook).order_by(Webhook.created_at.desc(), Webhook.id.desc()).limit(limit)
        )
        if owner is not None:
            statement = statement.where(Webhook.owner == owner)
        if after is not None:
            statement = statement.where(tuple_(Webhook.created_at, Webhook.id) < after)
        return (await self._session.scalars(statement)).all()

    async def remove(self, webhook: Webhook) -> None:
        """Delete an endpoint and all its deliveries."""
        await self._session.execute(delete(Webhook).where(Webhook.id == webhook.id))


class DeliveryRepository:
    """Reads and requeues deliveries of one endpoint."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, delivery: WebhookDelivery) -> None:
        """Store a new delivery, due now."""
        self._session.add(delivery)
        await self._session.flush()

    async def get(
        self, webhook_id: str, delivery_id: str, *, lock: bool = False
    ) -> WebhookDelivery | None:
        """A delivery of this endpoint; with `lock`, its row locked."""
        statement = select(WebhookDelivery).where(
            WebhookDelivery.id == delivery_id, WebhookDelivery.webhook_id == webhook_id
        )
        if lock:
            statement = statement.with_for_update().execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def page(
        self,
        webhook_id: str,
        status: str | None,
        limit: int,
        after: tuple[datetime, str] | None,
    ) -> Sequence[WebhookDelivery]:
        """Up to `limit` deliveries, newest first, older than the row `after`."""
        statement = (
            select(WebhookDelivery)
            .where(WebhookDelivery.webhook_id == webhook_id)
            .order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id.desc())
            .limit(limit)
        )
        if status is not None:
            statement = statement.where(WebhookDelivery.status == status)
        if after is not None:
            key = tuple_(WebhookDelivery.created_at, WebhookDelivery.id)
            statement = statement.where(key < after)
        return (await self._session.scalars(statement)).all()

    async def attempts(self, delivery_ids: Sequence[str]) -> dict[str, list[WebhookAttempt]]:
        """The newest attempts of each delivery, in order."""
        ranked = (
            select(
                WebhookAttempt,
                func.row_number()
                .over(
                    partition_by=WebhookAttempt.delivery_id,
                    order_by=WebhookAttempt.number.desc(),
                )
                .label("rank"),
            )
            .where(WebhookAttempt.delivery_id.in_(delivery_ids))
            .subquery()
        )
        statement = (
            select(WebhookAttempt)
            .join(
                ranked,
                (ranked.c.delivery_id == WebhookAttempt.delivery_id)
                & (ranked.c.number == WebhookAttempt.number),
            )
            .where(ranked.c.rank <= _SHOWN_ATTEMPTS)
            .order_by(WebhookAttempt.delivery_id, WebhookAttempt.number)
        )
        found: defaultdict[str, list[WebhookAttempt]] = defaultdict(list)
        for attempt in await self._session.scalars(statement):
            found[attempt.delivery_id].append(attempt)
        return found

    async def requeue_failed(self, webhook_id: str, since: datetime, until: datetime | None) -> int:
        """Make the failed deliveries that were created in the window due now; how many."""
        rows = (
            select(WebhookDelivery.id)
            .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.status == "failed")
            .where(WebhookDelivery.created_at >= since)
            .order_by(WebhookDelivery.created_at, WebhookDelivery.id)
            .limit(_MOST_REQUEUED)
        )
        if until is not None:
            rows = rows.where(WebhookDelivery.created_at < until)
        statement = (
            update(WebhookDelivery)
            .where(WebhookDelivery.id.in_(rows))
            .values(QUEUED_NOW)
            .returning(WebhookDelivery.id)
            .execution_options(synchronize_session=False)
        )
        return len((await self._session.execute(statement)).all())


# A delivery that is to be tried as if it were new.
QUEUED_NOW = {
    "status": "pending",
    "detail": None,
    "tries": 0,
    "queued_at": func.now(),
    "next_attempt_at": func.now(),
    "claimed_until": None,
    "ended_at": None,
}
