"""Named recipes and webhooks, written once for both clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any
from urllib.parse import quote

from octrain.client.pages import each, items_of
from octrain.client.records import (
    Delivery,
    NewWebhook,
    Recipe,
    Webhook,
)
from octrain.client.session import Session, one_time_key


class AsyncRecipes:
    """``client.recipes``: the service's presets and one's own named recipes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def get(self, name: str, version: int | None = None) -> Recipe:
        """A recipe in its newest version, or in the one asked for. Errors: NotFound."""
        answer = await self._session.request("GET", _recipe(name), params={"version": version})
        return Recipe.model_validate(answer)

    async def versions(self, name: str) -> list[Recipe]:
        """Every version, newest first. Errors: NotFound."""
        answer = await self._session.request("GET", f"{_recipe(name)}/versions")
        return [Recipe.model_validate(item) for item in items_of(answer)]

    async def save(self, name: str, fragment: Mapping[str, Any], description: str = "") -> Recipe:
        """Store a recipe, or the next version of one: parts of a spec such as ``recipe`` and
        ``conversion``. Errors: InvalidRequest."""
        body = {"name": name, "fragment": dict(fragment), "description": description}
        answer = await self._session.request("POST", "/recipes", json=body, headers=one_time_key())
        return Recipe.model_validate(answer)

    async def withdraw(self, name: str) -> None:
        """List it no more; specs that name it stay valid."""
        await self._session.request("DELETE", _recipe(name))

    async def list(self) -> AsyncIterator[Recipe]:
        """Presets with their reasons, then one's own by name, each in its newest version."""
        async with aclosing(each(self._session, "/recipes")) as found:
            async for item in found:
                yield Recipe.model_validate(item)


class AsyncWebhooks:
    """``client.webhooks``: endpoints that are told of one's own jobs."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(
        self,
        url: str,
        *,
        events: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        description: str = "",
    ) -> NewWebhook:
        """Send events (all without ``events``) to a URL. Its ``secret`` is never told again."""
        body: dict[str, Any] = {"url": url, "description": description}
        if events is not None:
            body["events"] = list(events)
        if labels is not None:
            body["labels"] = dict(labels)
        answer = await self._session.request("POST", "/webhooks", json=body, headers=one_time_key())
        return NewWebhook.model_validate(answer)

    async def list(self) -> AsyncIterator[Webhook]:
        """Webhooks, newest first."""
        async with aclosing(each(self._session, "/webhooks")) as found:
            async for item in found:
                yield Webhook.model_validate(item)

    async def get(self, webhook_id: str) -> Webhook:
        """One webhook. Errors: NotFound."""
        return Webhook.model_validate(await self._session.request("GET", _webhook(webhook_id)))

    async def edit(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        description: str | None = None,
        events: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        active: bool | None = None,
    ) -> Webhook:
        """Change what is given; ``active=True`` also enables one that the service disabled."""
        wanted: dict[str, Any] = {"url": url, "description": description, "active": active}
        wanted["events"] = list(events) if events is not None else None
        wanted["labels"] = dict(labels) if labels is not None else None
        changes = {key: value for key, value in wanted.items() if value is not None}
        answer = await self._session.request("PATCH", _webhook(webhook_id), json=changes)
        return Webhook.model_validate(answer)

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook and its delivery log."""
        await self._session.request("DELETE", _webhook(webhook_id))

    async def rotate(self, webhook_id: str, *, keep_seconds: int | None = None) -> NewWebhook:
        """Make a new secret; the former one signs as well for ``keep_seconds`` (a day)."""
        body = {} if keep_seconds is None else {"keep_seconds": keep_seconds}
        path = f"{_webhook(webhook_id)}/rotate"
        return NewWebhook.model_validate(await self._session.request("POST", path, json=body))

    async def test(self, webhook_id: str) -> Delivery:
        """Send a test call, once; ``delivery`` tells later what came back."""
        answer = await self._session.request("POST", f"{_webhook(webhook_id)}/test")
        return Delivery.model_validate(answer)

    async def deliveries(
        self, webhook_id: str, *, status: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Delivery]:
        """The delivery log, newest first: ``pending``, ``delivered`` or ``failed`` ones."""
        path = f"{_webhook(webhook_id)}/deliveries"
        async with aclosing(each(self._session, path, {"status": status}, limit)) as found:
            async for item in found:
                yield Delivery.model_validate(item)

    async def delivery(self, webhook_id: str, delivery_id: str) -> Delivery:
        """One delivery with its attempts. Errors: NotFound."""
        path = f"{_webhook(webhook_id)}/deliveries/{quote(delivery_id, safe='')}"
        return Delivery.model_validate(await self._session.request("GET", path))

    async def redeliver(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send a message again under the same id."""
        path = f"{_webhook(webhook_id)}/deliveries/{quote(delivery_id, safe='')}/redeliver"
        return Delivery.model_validate(await self._session.request("POST", path))

    async def redeliver_failed(
        self, webhook_id: str, since: datetime, until: datetime | None = None
    ) -> int:
        """Send every failed message of a window again; how many."""
        body = {"since": since.isoformat()}
        if until is not None:
            body["until"] = until.isoformat()
        path = f"{_webhook(webhook_id)}/redeliver"
        return int((await self._session.request("POST", path, json=body))["count"])


def _recipe(name: str) -> str:
    return f"/recipes/{quote(name, safe='')}"


def _webhook(webhook_id: str) -> str:
    return f"/webhooks/{quote(webhook_id, safe='')}"
