"""Buckets of rate limits in the database, shared by all API processes."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.rate_limits.policy import Policy

# The bucket is refilled for the time since it was last asked, and gives a whole number of
# requests. One statement, so that processes that ask at once are served one after the other.
_TAKE = text(
    """
    INSERT INTO rate_buckets AS b (name, tokens, granted, updated_at)
    VALUES (:name, CAST(:quota AS float8) - :portion, :portion, clock_timestamp())
    ON CONFLICT (name) DO UPDATE SET (tokens, granted, updated_at) = (
        SELECT filled.tokens - least(floor(filled.tokens), :portion),
               CAST(least(floor(filled.tokens), :portion) AS int), filled.now
        FROM (
            SELECT clock.now, least(CAST(:quota AS float8), b.tokens + CAST(:rate AS float8)
                * greatest(0, extract(epoch FROM clock.now - b.updated_at))) AS tokens
            FROM (SELECT clock_timestamp() AS now) AS clock
        ) AS filled
    )
    RETURNING granted, tokens
    """
)


async def take(session: AsyncSession, key: str, policy: Policy) -> tuple[int, int]:
    """Take a portion from the bucket of a key; how many requests it is, and how many are left."""
    parameters = {
        "name": f"{policy.name}:{key}",
        "quota": policy.quota,
        "rate": policy.rate,
        "portion": policy.portion,
    }
    row = (await session.execute(_TAKE, parameters)).one()
    return row.granted, int(row.tokens)
