"""Keys, nodes, quotas and the audit log, written once for both clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any
from urllib.parse import quote

from octrain.client.errors import OctrainError
from octrain.client.models import (
    Node,
    NodeSample,
    Readiness,
)
from octrain.client.pages import each, items_of
from octrain.client.records import (
    ApiKey,
    AuditEntry,
    EnrolmentToken,
    NewApiKey,
    OwnersQuotas,
    Quotas,
    Usage,
)
from octrain.client.session import Session, one_time_key


class AsyncKeys:
    """``client.keys``: API keys, for administrators."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(
        self,
        name: str,
        owner: str,
        scopes: Sequence[str],
        *,
        expires_at: datetime | None = None,
        node: str | None = None,
    ) -> NewApiKey:
        """Make a key. Its ``key`` is never told again. Errors: SecretShownOnce, where the answer
        was lost on its way; rotate the key that it names.

        ``expires_at`` needs a time zone. ``node`` is the one node that a key of the scope ``node``
        speaks for.
        """
        wanted: dict[str, Any] = {"name": name, "owner": owner, "scopes": list(scopes)}
        if expires_at is not None:
            wanted["expires_at"] = expires_at.isoformat()
        if node is not None:
            wanted["node"] = node
        answer = await self._session.request("POST", "/keys", json=wanted, headers=one_time_key())
        return NewApiKey.model_validate(answer)

    async def list(
        self, *, owner: str | None = None, revoked: bool = True
    ) -> AsyncIterator[ApiKey]:
        """Keys without their secrets, oldest first; without the revoked ones if wanted."""
        params = {"owner": owner, "revoked": str(revoked).lower()}
        async with aclosing(each(self._session, "/keys", params)) as found:
            async for item in found:
                yield ApiKey.model_validate(item)

    async def own(self) -> ApiKey:
        """The key that this client uses."""
        return ApiKey.model_validate(await self._session.request("GET", "/keys/self"))

    async def get(self, key_id: str) -> ApiKey:
        """One key. Errors: NotFound."""
        return ApiKey.model_validate(await self._session.request("GET", _key(key_id)))

    async def edit(
        self,
        key_id: str,
        *,
        name: str | None = None,
        expires_at: datetime | None = None,
        never_expires: bool = False,
    ) -> ApiKey:
        """Rename a key, or say when it ends, or that it does not; what is None stays."""
        if never_expires and expires_at is not None:
            raise OctrainError("A key that never expires has no expires_at: give one of them.")
        changes: dict[str, Any] = {"expires_at": None} if never_expires else {}
        if name is not None:
            changes["name"] = name
        if expires_at is not None:
            changes["expires_at"] = expires_at.isoformat()
        answer = await self._session.request("PATCH", _key(key_id), json=changes)
        return ApiKey.model_validate(answer)

    async def rotate(self, key_id: str, *, grace_seconds: int | None = None) -> NewApiKey:
        """Give the key a new secret; the present one serves for ``grace_seconds`` (a day)."""
        body = {} if grace_seconds is None else {"grace_seconds": grace_seconds}
        answer = await self._session.request("POST", f"{_key(key_id)}/rotate", json=body)
        return NewApiKey.model_validate(answer)

    async def revoke(self, key_id: str) -> ApiKey:
        """Refuse the key from now on."""
        return ApiKey.model_validate(await self._session.request("DELETE", _key(key_id)))


class AsyncOperations:
    """What is asked of the service itself."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def nodes(self) -> list[Node]:
        """The machines that run jobs."""
        answer = await self._session.request("GET", "/nodes")
        return [Node.model_validate(item) for item in items_of(answer)]

    async def node_metrics(
        self, node_id: str, *, seconds: float | None = None, max_points: int | None = None
    ) -> list[NodeSample]:
        """What a node's GPUs and its host did in the last ``seconds`` (an hour), oldest first."""
        answer = await self._session.request(
            "GET",
            f"/nodes/{quote(node_id, safe='')}/metrics",
            params={"seconds": seconds, "max_points": max_points},
        )
        return [NodeSample.model_validate(item) for item in items_of(answer, "samples")]

    async def drain_node(self, node_id: str, *, release: bool = False) -> Node:
        """Give a node no more jobs; ``release`` sends those on it back to the queue."""
        params = {"release": "true"} if release else None
        return await self._of_node(node_id, "drain", params)

    async def undrain_node(self, node_id: str) -> Node:
        """Give a node jobs again."""
        return await self._of_node(node_id, "undrain")

    async def release_node(self, node_id: str) -> Node:
        """Give jobs again to a node that was set aside for repeated faults."""
        return await self._of_node(node_id, "release")

    async def create_enrolment_token(
        self,
        *,
        node: str | None = None,
        owner: str | None = None,
        expires_in_seconds: int | None = None,
    ) -> EnrolmentToken:
        """Make a one-time token with which a machine gets the key of its node."""
        wanted = {"node": node, "owner": owner, "expires_in_seconds": expires_in_seconds}
        body = {key: value for key, value in wanted.items() if value is not None}
        answer = await self._session.request(
            "POST", "/nodes/tokens", json=body, headers=one_time_key()
        )
        return EnrolmentToken.model_validate(answer)

    async def enrolment_tokens(self) -> list[EnrolmentToken]:
        """The newest 500 enrolment tokens, without their secrets, and what became of them."""
        answer = await self._session.request("GET", "/nodes/tokens")
        return [EnrolmentToken.model_validate(item) for item in items_of(answer)]

    async def revoke_enrolment_token(self, token_id: str) -> EnrolmentToken:
        """End a token that no machine has used. Errors: NotFound, Conflict for a used one."""
        path = f"/nodes/tokens/{quote(token_id, safe='')}"
        return EnrolmentToken.model_validate(await self._session.request("DELETE", path))

    async def readiness(self) -> Readiness:
        """Whether the service can do its work, and what is wrong with which part; needs no key."""
        return Readiness.model_validate(await self._session.readiness())

    async def usage(self, owner: str | None = None) -> Usage:
        """What the owner of this key (or, for administrators, another) uses, and may use."""
        path = "/usage" if owner is None else f"/usage/{quote(owner, safe='')}"
        return Usage.model_validate(await self._session.request("GET", path))

    async def quotas(self) -> OwnersQuotas:
        """The default quotas, and those of owners who have others (for administrators)."""
        return OwnersQuotas.model_validate(await self._session.request("GET", "/quotas"))

    async def set_quotas(
        self,
        owner: str,
        *,
        queued: int | None = None,
        running: int | None = None,
        gpu_hours: float | None = None,
    ) -> Quotas:
        """Give an owner quotas in place of the default; None is no limit."""
        body = {"queued": queued, "running": running, "gpu_hours": gpu_hours}
        path = f"/quotas/{quote(owner, safe='')}"
        answer = await self._session.request("PUT", path, json=body, repeatable=True)
        return Quotas.model_validate(answer)

    async def reset_quotas(self, owner: str) -> Quotas:
        """Give an owner the default quotas again, which are returned."""
        path = f"/quotas/{quote(owner, safe='')}"
        return Quotas.model_validate(await self._session.request("DELETE", path))

    async def audit(
        self,
        *,
        owner: str | None = None,
        key_id: str | None = None,
        target: str | None = None,
        outcome: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[AuditEntry]:
        """Who changed what, newest first, page by page. ``since`` and ``until`` need a zone."""
        params = {
            "owner": owner,
            "key_id": key_id,
            "target": target,
            "outcome": outcome,
            "since": since.isoformat() if since is not None else None,
            "until": until.isoformat() if until is not None else None,
        }
        async with aclosing(each(self._session, "/audit", params, limit)) as found:
            async for item in found:
                yield AuditEntry.model_validate(item)

    async def _of_node(
        self, node_id: str, action: str, params: dict[str, Any] | None = None
    ) -> Node:
        path = f"/nodes/{quote(node_id, safe='')}/{action}"
        return Node.model_validate(await self._session.request("POST", path, params=params))


def _key(key_id: str) -> str:
    return f"/keys/{quote(key_id, safe='')}"
