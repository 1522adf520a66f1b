"""Idempotency keys in the database, which alone decides who came first."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

# A lock of the transaction: it is held until the work is committed or undone, by every process
# alike, and is gone with the connection of one that was killed. Nobody waits for it.
_CLAIM = text(
    """
    SELECT pg_try_advisory_xact_lock(hashtextextended(:lock, 0)) AS is_free,
           k.request_hash, k.target
    FROM (SELECT 1) AS one
    LEFT JOIN idempotency_keys k
      ON k.owner = :owner AND k.key = :key AND k.created_at > now() - interval '24 hours'
    """
)
# What was forgotten after 24 hours may still be there: the sweep comes later.
_KEEP = text(
    """
    INSERT INTO idempotency_keys AS k (owner, key, request_hash, target)
    VALUES (:owner, :key, :request_hash, :target)
    ON CONFLICT (owner, key) DO UPDATE SET
        request_hash = excluded.request_hash, target = excluded.target, created_at = now()
    WHERE k.created_at <= now() - interval '24 hours'
    RETURNING 1
    """
)
_FORGET = text(
    """
    DELETE FROM idempotency_keys WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM idempotency_keys
        WHERE created_at <= now() - interval '24 hours' LIMIT :most))
    """
)


def lock_of(owner: str, key: str) -> str:
    """The name of the lock of an owner's key."""
    return f"idempotency {owner} {key}"


@dataclass(frozen=True)
class Kept:
    """The row under which a request will be known, but for what it made."""

    owner: str
    key: str
    request_hash: str

    @property
    def lock(self) -> str:
        """The name of the lock that a request with the key takes."""
        return lock_of(self.owner, self.key)


@dataclass(frozen=True)
class Claim:
    """What is known of a key: whether nobody works under it now, and what was made under it."""

    is_free: bool
    request_hash: str | None
    target: str | None


class IdempotencyRepository:
    """Claims, keeps and forgets keys."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def claim(self, owner: str, key: str) -> Claim:
        """Take the key for this transaction, unless another has it; what was made under it.

        Of a request that commits at this very moment both the lock and the row can be missed:
        whoever goes on must `keep` before the commit.
        """
        values = {"owner": owner, "key": key, "lock": lock_of(owner, key)}
        row = (await self._session.execute(_CLAIM, values)).one()
        return Claim(row.is_free, row.request_hash, row.target)

    async def keep(self, values: dict[str, Any]) -> bool:
        """Store what was made, by owner, key, request_hash and target; whether nobody else did."""
        return (await self._session.execute(_KEEP, values)).first() is not None

    async def forget_old(self, most: int) -> int:
        """Remove at most so many keys of more than 24 hours; how many there were."""
        done = await self._session.execute(_FORGET, {"most": most})
        return int(done.rowcount)  # type: ignore[attr-defined]
