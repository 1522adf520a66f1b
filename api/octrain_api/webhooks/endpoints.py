"""Webhooks over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from octrain_api.auth import Writer
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.idempotency.once import OnceDep
from octrain_api.webhooks.schemas import (
    DeliveryDetail,
    DeliveryList,
    DeliveryStatus,
    NewWebhookObject,
    RedeliverRequest,
    Requeued,
    SecretRotation,
    WebhookChanges,
    WebhookList,
    WebhookObject,
    WebhookRequest,
)
from octrain_api.webhooks.service import WebhookService

router = APIRouter(prefix="/webhooks", tags=["webhooks"])


async def _service(session: SessionDep, context: ContextDep, principal: Writer) -> WebhookService:
    return WebhookService(session, context.settings.webhooks, principal)


Service = Annotated[WebhookService, Depends(_service, scope="function")]
Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str | None, Query(max_length=512)]


@router.post("", status_code=201)
async def create_webhook(
    body: WebhookRequest, response: Response, service: Service, once: OnceDep
) -> NewWebhookObject:
    """Send events of one's own jobs to a URL. This answer is the only one that shows the secret.

    Sent again with its Idempotency-Key, it shows the secret that the webhook has by then.
    """
    identifier = await once.earlier()
    if identifier is not None:
        made = await service.get_with_secret(identifier)
        once.mark(response)
    else:
        made = await service.create(body)
        await once.made(made.id)
    response.headers["Location"] = f"/v1/webhooks/{made.id}"
    return made


@router.get("")
async def list_webhooks(service: Service, limit: Limit = 50, cursor: Cursor = None) -> WebhookList:
    """Webhooks, newest first, without secrets."""
    return await service.list_page(limit, cursor)


@router.get("/{webhook_id}")
async def get_webhook(webhook_id: str, service: Service) -> WebhookObject:
    """One webhook, and how it is doing."""
    return await service.get(webhook_id)


@router.patch("/{webhook_id}")
async def change_webhook(webhook_id: str, body: WebhookChanges, service: Service) -> WebhookObject:
    """Change what is sent; `active: true` also switches a disabled webhook on again."""
    return await service.change(webhook_id, body)


@router.delete("/{webhook_id}", status_code=204)
async def delete_webhook(webhook_id: str, service: Service) -> None:
    """Delete a webhook and its delivery log."""
    await service.remove(webhook_id)


@router.post("/{webhook_id}/rotate")
async def rotate_webhook_secret(
    webhook_id: str, service: Service, body: SecretRotation | None = None
) -> NewWebhookObject:
    """Make a new secret; deliveries carry signatures of both until the former one ends."""
    return await service.rotate(webhook_id, (body or SecretRotation()).keep_seconds)


@router.post("/{webhook_id}/test", status_code=202)
async def test_webhook(webhook_id: str, service: Service) -> DeliveryDetail:
    """Send a test call, once; ask for the delivery to see what came back."""
    return await service.test(webhook_id)


@router.get("/{webhook_id}/deliveries")
async def list_webhook_deliveries(
    webhook_id: str,
    service: Service,
    status: DeliveryStatus | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> DeliveryList:
    """The delivery log, newest first."""
    return await service.list_deliveries(webhook_id, status, limit, cursor)


@router.get("/{webhook_id}/deliveries/{delivery_id}")
async def get_webhook_delivery(
    webhook_id: str, delivery_id: str, service: Service
) -> DeliveryDetail:
    """One delivery: its attempts, and the body that is sent."""
    return await service.delivery(webhook_id, delivery_id)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", status_code=202)
async def redeliver_webhook_delivery(
    webhook_id: str, delivery_id: str, service: Service
) -> DeliveryDetail:
    """Send a message again under the same id, whether it was taken before or not."""
    return await service.redeliver(webhook_id, delivery_id)


@router.post("/{webhook_id}/redeliver", status_code=202)
async def redeliver_failed_deliveries(
    webhook_id: str, body: RedeliverRequest, service: Service
) -> Requeued:
    """After an outage: send every failed message of a window again."""
    return Requeued(count=await service.redeliver_failed(webhook_id, body))
