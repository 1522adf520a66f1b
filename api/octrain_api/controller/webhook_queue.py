"""What the delivery of webhooks reads and writes: the outbox, what is due, what came of it."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import and_, delete, func, literal, or_, select, true, union_all, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now, seconds
from octrain_api.events.repository import EventRepository
from octrain_api.ids import new_id
from octrain_api.jobs.repository import JobRepository
from octrain_api.models import (
    Event,
    Job,
    Webhook,
    WebhookAttempt,
    WebhookDelivery,
    WebhookOutbox,
)
from octrain_api.settings import WebhookSettings
from octrain_api.webhooks.messages import TEST_TYPE, event_body, event_type, message_id, wants
from octrain_api.webhooks.sender import Outcome

_OUTBOX_BATCH = 500
_CLEANING_BATCH = 5000
_GROWTH = 4
_GONE = 410


@dataclass(frozen=True)
class Due:
    """A delivery whose time has come; `failing` says that its endpoint takes nothing now."""

    delivery_id: str
    webhook_id: str
    failing: bool


@dataclass(frozen=True)
class Parcel:
    """Everything needed to send. `keys` are the secrets that sign, the newest first."""

    delivery_id: str
    webhook_id: str
    url: str
    keys: list[str]
    message_id: str
    body: str


def pause_after(tries: int, settings: WebhookSettings) -> float:
    """Seconds to the next try after so many failures: exponential, a fifth of jitter each way."""
    doubled = settings.retry_first * float(_GROWTH) ** min(tries - 1, 30)
    return min(doubled, settings.retry_longest) * random.uniform(0.8, 1.2)


class WebhookQueue:
    """Queries of one transaction of the delivery loop."""

    def __init__(self, session: AsyncSession, settings: WebhookSettings) -> None:
        self._session = session
        self._settings = settings

    async def fan_out(self) -> int:
        """Make deliveries of events in the outbox; how many events it took from there."""
        first = select(WebhookOutbox.id).order_by(WebhookOutbox.id).limit(_OUTBOX_BATCH)
        taken = (
            await self._session.execute(
                delete(WebhookOutbox)
                .where(WebhookOutbox.id.in_(first.with_for_update(skip_locked=True)))
                .returning(WebhookOutbox.id, WebhookOutbox.job_id, WebhookOutbox.seq)
            )
        ).all()
        if not taken:
            return 0
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for row in taken:
            numbers[row.job_id].append(row.seq)
        statement = select(Event, Job).join(Job, Job.id == Event.job_id)
        of_jobs = [
            and_(Event.job_id == job_id, Event.seq.in_(seqs)) for job_id, seqs in numbers.items()
        ]
        rows = (await self._session.execute(statement.where(or_(*of_jobs)))).all()
        webhooks = await self._webhooks_of({job.owner for _, job in rows})
        order = {(row.job_id, row.seq): row.id for row in taken}
        made = []
        for event, job in sorted(rows, key=lambda row: order[row[0].job_id, row[0].seq]):
            kind = event_type(event.kind, event.data)
            for webhook in webhooks[job.owner]:
                if event.time < webhook.created_at:
                    continue
                if wants(webhook.events, webhook.labels, kind, job.labels):
                    made.append(
                        {
                            "id": new_id("whd"),
                            "webhook_id": webhook.id,
                            "message_id": message_id(event),
                            "type": kind,
                            "job_id": job.id,
                            "event_seq": event.seq,
                            "body": event_body(event, job),
                        }
                    )
        if made:
            await self._session.execute(
                insert(WebhookDelivery).values(made).on_conflict_do_nothing()
            )
        return len(taken)

    async def _webhooks_of(self, owners: set[str]) -> Mapping[str, list[Webhook]]:
        """The endpoints of these owners that take events; kept from being deleted meanwhile."""
        statement = (
            select(Webhook)
            .where(Webhook.owner.in_(owners), Webhook.active, Webhook.disabled_at.is_(None))
            .order_by(Webhook.id)
            .with_for_update(read=True, key_share=True)
        )
        found: defaultdict[str, list[Webhook]] = defaultdict(list)
        for webhook in await self._session.scalars(statement):
            found[webhook.owner].append(webhook)
        return found

    async def due(self, per_endpoint: int) -> list[Due]:
        """What may be sent now, the longest due first; so many of one endpoint at most."""
        now = func.now()
        delivery = WebhookDelivery
        open_now = and_(
            delivery.status == "pending",
            delivery.next_attempt_at <= now,
            or_(delivery.claimed_until.is_(None), delivery.claimed_until <= now),
        )
        heads = (
            select(delivery.id, delivery.next_attempt_at)
            .where(delivery.webhook_id == Webhook.id, open_now)
            .order_by(delivery.next_attempt_at, delivery.id)
            .limit(per_endpoint)
            .lateral()
        )
        ready = (
            select(
                heads.c.id,
                Webhook.id.label("webhook_id"),
                Webhook.failing_since.is_not(None).label("failing"),
                heads.c.next_attempt_at,
            )
            .select_from(Webhook)
            .join(heads, true())
            .where(Webhook.active, Webhook.disabled_at.is_(None))
            .where(or_(Webhook.not_before.is_(None), Webhook.not_before <= now))
        )
        # A test call goes also to an endpoint that is switched off.
        tests = select(
            delivery.id,
            delivery.webhook_id,
            literal(False).label("failing"),
            delivery.next_attempt_at,
        ).where(delivery.type == TEST_TYPE, open_now)
        both = union_all(ready, tests).subquery()
        statement = select(both).order_by(both.c.next_attempt_at, both.c.id)
        found: dict[str, Due] = {}
        for row in await self._session.execute(statement):
            found.setdefault(row.id, Due(row.id, row.webhook_id, row.failing))
        return list(found.values())

    async def claim(self, chosen: Sequence[Due], claim_seconds: float) -> list[Parcel]:
        """Keep others, and a later look, from sending these; what is still to be sent."""
        now = func.now()
        statement = (
            update(WebhookDelivery)
            .where(WebhookDelivery.id.in_([due.delivery_id for due in chosen]))
            .where(WebhookDelivery.status == "pending", WebhookDelivery.next_attempt_at <= now)
            .where(
                or_(WebhookDelivery.claimed_until.is_(None), WebhookDelivery.claimed_until <= now)
            )
            .values(claimed_until=now + seconds(claim_seconds))
            .returning(
                WebhookDelivery.id,
                WebhookDelivery.webhook_id,
                WebhookDelivery.message_id,
                WebhookDelivery.body,
            )
            .execution_options(synchronize_session=False)
        )
        rows = (await self._session.execute(statement)).all()
        time = await database_now(self._session)
        ids = {row.webhook_id for row in rows}
        found = await self._session.scalars(select(Webhook).where(Webhook.id.in_(ids)))
        webhooks = {webhook.id: webhook for webhook in found}
        return [
            Parcel(
                delivery_id=row.id,
                webhook_id=row.webhook_id,
                url=webhooks[row.webhook_id].url,
                keys=_keys(webhooks[row.webhook_id], time),
                message_id=row.message_id,
                body=row.body,
            )
            for row in rows
            if row.webhook_id in webhooks
        ]

    async def release(self, delivery_ids: Sequence[str]) -> None:
        """Give up claims: another controller need not wait for their end."""
        await self._session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.id.in_(delivery_ids))
            .values(claimed_until=None)
            .execution_options(synchronize_session=False)
        )

    async def record(self, parcel: Parcel, outcome: Outcome) -> None:
        """Note an attempt, and decide on the next one and on the endpoint."""
        webhook = await self._session.get(
            Webhook, parcel.webhook_id, with_for_update=True, populate_existing=True
        )
        delivery = await self._session.get(
            WebhookDelivery, parcel.delivery_id, with_for_update=True, populate_existing=True
        )
        if webhook is None or delivery is None:
            return  # deleted while it was being sent
        now = await database_now(self._session)
        delivery.attempts += 1
        delivery.tries += 1
        delivery.claimed_until = None
        self._session.add(
            WebhookAttempt(
                delivery_id=delivery.id,
                number=delivery.attempts,
                started_at=now - timedelta(milliseconds=outcome.duration_ms),
                status_code=outcome.status,
                duration_ms=outcome.duration_ms,
                error=outcome.error,
                response_excerpt=outcome.excerpt,
            )
        )
        if outcome.ok:
            _end(delivery, "delivered", None, now)
        elif delivery.type == TEST_TYPE:
            _end(delivery, "failed", "A test call is tried once.", now)
        elif delivery.status == "pending":
            self._retry_later(delivery, outcome, now)
        if delivery.type != TEST_TYPE:
            await self._judge(webhook, delivery, outcome, now)
        await self._session.flush()

    def _retry_later(self, delivery: WebhookDelivery, outcome: Outcome, now: datetime) -> None:
        pause = pause_after(delivery.tries, self._settings)
        if outcome.retry_after is not None:
            pause = max(pause, min(outcome.retry_after, self._settings.retry_longest))
        following = now + timedelta(seconds=pause)
        limit = self._settings.give_up_after
        if following > delivery.queued_at + timedelta(seconds=limit):
            _end(delivery, "failed", f"Given up: not taken within {limit:g} s.", now)
        else:
            delivery.next_attempt_at = following

    async def _judge(
        self, webhook: Webhook, delivery: WebhookDelivery, outcome: Outcome, now: datetime
    ) -> None:
        """What the attempt says of the endpoint."""
        if outcome.ok:
            webhook.last_success_at = now
            webhook.failing_since, webhook.failures, webhook.not_before = None, 0, None
            return
        webhook.failing_since = webhook.failing_since or now
        webhook.failures += 1
        if outcome.retry_after is not None:
            peace = min(outcome.retry_after, self._settings.retry_longest)
            webhook.not_before = now + timedelta(seconds=peace)
        if webhook.disabled_at is not None:
            return
        long_enough = timedelta(seconds=self._settings.disable_after)
        if outcome.status == _GONE:
            await self._disable(webhook, delivery, "the endpoint answered 410 Gone", now)
        elif (
            webhook.failures >= self._settings.disable_failures
            and now - webhook.failing_since >= long_enough
        ):
            since = webhook.failing_since.isoformat(timespec="seconds")
            reason = f"{webhook.failures} attempts in a row failed since {since}"
            await self._disable(webhook, delivery, f"{reason}; the last one: {outcome.error}", now)

    async def _disable(
        self, webhook: Webhook, delivery: WebhookDelivery, reason: str, now: datetime
    ) -> None:
        webhook.disabled_at, webhook.disabled_reason = now, reason
        _end(delivery, "failed", "The webhook was disabled.", now)
        await self._session.flush()
        await self._session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.webhook_id == webhook.id, WebhookDelivery.status == "pending")
            .where(WebhookDelivery.type != TEST_TYPE)
            .values(
                status="failed",
                detail="The webhook was disabled.",
                next_attempt_at=None,
                ended_at=now,
            )
            .execution_options(synchronize_session=False)
        )
        # Told in the log of the job whose event it did not take, and so to the owner's other ones.
        job = await JobRepository(self._session).lock(delivery.job_id or "")
        if job is not None:
            await EventRepository(self._session).append(
                job,
                kind="webhook_disabled",
                actor="service",
                message=f"Webhook {webhook.id} is disabled: {reason}.",
                data={"webhook_id": webhook.id, "reason": reason, "delivery_id": delivery.id},
            )

    async def give_up_old(self) -> int:
        """Fail what was not taken in time, though it could not be tried: paused, or too many."""
        limit = self._settings.give_up_after
        rows = (
            select(WebhookDelivery.id)
            .where(WebhookDelivery.status == "pending")
            .where(WebhookDelivery.queued_at < func.now() - seconds(limit))
            .where(
                or_(
                    WebhookDelivery.claimed_until.is_(None),
                    WebhookDelivery.claimed_until <= func.now(),
                )
            )
            .limit(_CLEANING_BATCH)
            .with_for_update(skip_locked=True)
        )
        result = await self._session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.id.in_(rows))
            .values(
                status="failed",
                detail=f"Given up: not taken within {limit:g} s.",
                next_attempt_at=None,
                ended_at=func.now(),
            )
            .returning(WebhookDelivery.id)
            .execution_options(synchronize_session=False)
        )
        return len(result.all())

    async def forget_old(self) -> int:
        """Delete what ended long ago; how many."""
        rows = (
            select(WebhookDelivery.id)
            .where(WebhookDelivery.ended_at < func.now() - seconds(self._settings.keep_deliveries))
            .limit(_CLEANING_BATCH)
        )
        result = await self._session.execute(
            delete(WebhookDelivery)
            .where(WebhookDelivery.id.in_(rows))
            .returning(WebhookDelivery.id)
            .execution_options(synchronize_session=False)
        )
        return len(result.all())


def _end(delivery: WebhookDelivery, status: str, detail: str | None, now: datetime) -> None:
    delivery.status, delivery.detail = status, detail
    delivery.next_attempt_at, delivery.ended_at = None, now


def _keys(webhook: Webhook, now: datetime) -> list[str]:
    """The secrets that sign now."""
    old = [
        each["secret"]
        for each in webhook.old_secrets
        if datetime.fromisoformat(each["until"]) > now
    ]
    return [webhook.secret, *old]
