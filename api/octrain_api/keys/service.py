"""Making, rotating, expiring and revoking API keys."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now, lock_name
from octrain_api.ids import new_id
from octrain_api.keys.principal import hash_key, new_key
from octrain_api.keys.repository import KeyRepository
from octrain_api.keys.schemas import KeyChange, KeyList, KeyObject, KeyRequest, NewKeyObject
from octrain_api.models import ApiKey
from octrain_api.pagination import cut, decode_cursor, encode_cursor
from octrain_api.problems import Problem, ProblemError, conflict, not_found


class KeyService:
    """Keys are shown once, when they are made or rotated."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._keys = KeyRepository(session)

    async def create(self, request: KeyRequest) -> NewKeyObject:
        """Make a key. One that names a node takes the place of the node's former key."""
        now = await database_now(self._session)
        if request.expires_at is not None and request.expires_at <= now:
            raise _past()
        if request.node is not None:
            await lock_name(self._session, f"node {request.node}")
            for former in await self._keys.of_node(request.node):
                await self._keys.revoke(former)
        key = new_key()
        row = ApiKey(
            id=new_id("key"),
            name=request.name,
            owner=request.owner,
            key_hash=hash_key(key),
            scopes=sorted(set(request.scopes)),
            expires_at=request.expires_at,
            node_name=request.node,
        )
        await self._keys.add(row)
        return NewKeyObject(**key_object(row).model_dump(), key=key)

    async def list_page(
        self, owner: str | None, with_revoked: bool, limit: int, cursor: str | None
    ) -> KeyList:
        """One page of keys, oldest first."""
        after = decode_cursor(cursor) if cursor is not None else None
        rows = await self._keys.page(owner, with_revoked, limit + 1, after)
        page = rows[:limit]
        last = encode_cursor(page[-1].created_at, page[-1].id) if cut(rows, limit) else None
        return KeyList(items=[key_object(row) for row in page], next_cursor=last)

    async def get(self, key_id: str) -> KeyObject:
        """One key."""
        return key_object(await self._one(key_id))

    async def change(self, key_id: str, change: KeyChange) -> KeyObject:
        """Rename a key, or set or take away the time of its end."""
        row = await self._one(key_id, lock=True)
        self._refuse_revoked(row)
        if "expires_at" in change.model_fields_set:
            now = await database_now(self._session)
            if change.expires_at is not None and change.expires_at <= now:
                raise _past()
            row.expires_at = change.expires_at
        if change.name is not None:
            row.name = change.name
        await self._keys.changed(row)
        return key_object(row)

    async def rotate(self, key_id: str, grace_seconds: int) -> NewKeyObject:
        """Give the key a new secret. The present one serves until the grace is over, none longer:
        rotating again ends the one before at once."""
        row = await self._one(key_id, lock=True)
        self._refuse_revoked(row)
        now = await database_now(self._session)
        key = new_key()
        row.previous_hash, row.key_hash = row.key_hash, hash_key(key)
        row.previous_until = now + timedelta(seconds=grace_seconds)
        await self._keys.changed(row)
        return NewKeyObject(**key_object(row).model_dump(), key=key)

    async def revoke(self, key_id: str) -> KeyObject:
        """Refuse the key from now on."""
        row = await self._one(key_id, lock=True)
        await self._keys.revoke(row)
        return key_object(row)

    async def bind(self, key_id: str, node: str) -> None:
        """Let a key of the scope `node` speak for this node and no other, from its first
        registration on. The caller holds the node's name."""
        row = await self._one(key_id, lock=True)
        if row.node_name == node:
            return
        if row.node_name is not None:
            raise Problem(
                403,
                "node-key-bound",
                "Not allowed",
                f"This key speaks for the node {row.node_name!r}. Enrol {node!r} for a key of its "
                "own.",
            )
        for other in await self._keys.of_node(node):
            if other.expires_at is None or other.expires_at > await database_now(self._session):
                raise Problem(
                    403,
                    "node-name-taken",
                    "Not allowed",
                    f"The node {node!r} has the key {other.id}. Revoke it, or enrol the machine "
                    "with a token for this node.",
                )
            await self._keys.revoke(other)
        row.node_name = node
        await self._keys.changed(row)

    async def _one(self, key_id: str, *, lock: bool = False) -> ApiKey:
        row = await (self._keys.lock(key_id) if lock else self._keys.get(key_id))
        if row is None:
            raise not_found("key", key_id)
        return row

    @staticmethod
    def _refuse_revoked(row: ApiKey) -> None:
        if row.revoked_at is not None:
            raise conflict("key-revoked", f"The key {row.id} is revoked; make a new one.")


def _past() -> Problem:
    message = "a key cannot end in the past; DELETE it to end it now"
    error = ProblemError(pointer="/expires_at", message=message, code="past")
    return Problem(422, "request-invalid", "Request not valid", message, errors=[error])


def key_object(row: ApiKey) -> KeyObject:
    """A key as readers see it."""
    return KeyObject(
        id=row.id,
        name=row.name,
        owner=row.owner,
        scopes=row.scopes,
        node=row.node_name,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        previous_until=row.previous_until,
    )
