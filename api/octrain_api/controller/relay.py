"""The outbox to Celery: a message is sent until its attempt is claimed, or placed elsewhere.

Celery carries a pointer only. A message sent twice, late or in vain does no harm, because the
attempt can be claimed once; so nothing here needs to be exact, only persistent.
"""

import asyncio
import logging
from typing import Any, Protocol

from celery import Celery
from kombu.exceptions import KombuError, OperationalError
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.attempts.repository import AttemptRepository
from octrain_api.broker import celery_tls
from octrain_api.controller.one_by_one import judge_each
from octrain_api.controller.repository import ControllerRepository
from octrain_api.database import Database
from octrain_api.jobs import transitions
from octrain_api.jobs.repository import JobRepository
from octrain_api.jobs.transitions import Actor, Status
from octrain_api.observability.tracing import Tracing
from octrain_api.settings import BrokerSettings, ControllerSettings

log = logging.getLogger("octrain_api.relay")

TASK = "octrain.run_attempt"
_NO_TRACING = Tracing()


class BrokerUnavailable(Exception):
    """The broker did not take the message."""


class Sender(Protocol):
    """Something that sends a task to a queue."""

    def send(self, queue: str, task_id: str, payload: dict[str, Any]) -> None:
        """Send, or raise BrokerUnavailable. Blocks."""


class CelerySender:
    """Sends through Celery, without results, retrying a stale connection once."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._app = Celery("octrain", broker=settings.url)
        self._app.conf.update(
            broker_use_ssl=celery_tls(settings) or None,
            task_ignore_result=True,
            task_serializer="json",
            accept_content=["json"],
            broker_connection_timeout=settings.connect_timeout,
            broker_transport_options={
                "socket_connect_timeout": settings.connect_timeout,
                "socket_timeout": 10,
                "socket_keepalive": True,
                "health_check_interval": 15,
                "visibility_timeout": 3600,
            },
        )

    def send(self, queue: str, task_id: str, payload: dict[str, Any]) -> None:
        """Send, or raise BrokerUnavailable. Blocks."""
        # The trace context is no argument of the task, but travels as it does over HTTP.
        arguments = {key: value for key, value in payload.items() if key != "traceparent"}
        traceparent = payload.get("traceparent")
        try:
            self._app.send_task(
                TASK,
                kwargs=arguments,
                headers={"traceparent": traceparent} if traceparent is not None else None,
                queue=queue,
                task_id=task_id,
                ignore_result=True,
                retry=True,
                retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0.1},
            )
        except (OperationalError, KombuError, RedisError, OSError) as error:
            raise BrokerUnavailable(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the connections to the broker."""
        self._app.close()


async def relay(
    database: Database,
    settings: ControllerSettings,
    sender: Sender,
    tracing: Tracing = _NO_TRACING,
) -> int:
    """Send what is due; how many. Raises BrokerUnavailable, and then the rest stays for later."""
    async with database.session() as session:
        repository = ControllerRepository(session)
        due = await repository.messages_due(settings.resend_after, settings.max_sendings)
    sent: list[str] = []
    try:
        for message in due:
            try:
                await asyncio.to_thread(
                    sender.send, message.queue, message.task_id, message.payload
                )
                tracing.record(
                    "relay",
                    message.payload.get("traceparent"),
                    message.created_at,
                    {"octrain.job_id": message.payload["job_id"], "octrain.queue": message.queue},
                )
            except BrokerUnavailable:
                raise
            except Exception:
                # Counted all the same, so that its attempt is taken back when nobody claims it.
                log.exception("the message of %s cannot be sent", message.attempt_id)
            sent.append(message.attempt_id)
    except BrokerUnavailable:
        log.warning("the broker took %d of %d messages", len(sent), len(due))
        raise
    finally:
        # Together: one commit for each would be slower than the sending.
        if sent:
            async with database.transaction() as session:
                await ControllerRepository(session).mark_sent(sent)
    return len(due)


async def place_elsewhere(database: Database, settings: ControllerSettings) -> int:
    """Take back the attempts that no supervisor has claimed, nor will; how many."""
    async with database.session() as session:
        rows = await ControllerRepository(session).undelivered(
            settings.resend_after, settings.max_sendings, settings.downtime_tolerance
        )
    await judge_each(database, rows, _take_back)
    return len(rows)


async def _take_back(session: AsyncSession, job_id: str, attempt_id: str, silent: bool) -> None:
    job = await JobRepository(session).lock(job_id)
    attempts = AttemptRepository(session)
    attempt = await attempts.lock(attempt_id)
    if job is None or attempt.status != "placed":
        return
    await attempts.end(
        attempt,
        outcome="failed",
        reason="undelivered",
        detail="The node was not heard any more before it took the attempt."
        if silent
        else "The node was told of the attempt, again and again, and did not take it.",
    )
    job.avoid_nodes = sorted({*job.avoid_nodes, attempt.node_id})
    await transitions.apply(
        session,
        job,
        Status.QUEUED,
        Actor.SCHEDULER,
        message="The node did not take the attempt; the job is placed elsewhere.",
        data={"attempt_id": attempt.id, "node_id": attempt.node_id},
    )
