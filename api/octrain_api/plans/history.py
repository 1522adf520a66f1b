"""How fast an owner's like jobs were."""

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.plans.key import relevant

# The newest jobs only: what is older ran on other versions, and the search stays short.
_LIKE = text(
    """
    SELECT recent.id, recent.rate FROM (
        SELECT id, spec, CAST(latest_metrics->>'perf/tokens_per_second' AS double precision) AS rate
        FROM jobs
        WHERE owner = :owner AND device = :device AND status IN ('succeeded', 'running', 'paused')
          AND jsonb_typeof(latest_metrics->'perf/tokens_per_second') = 'number'
        ORDER BY created_at DESC, id DESC LIMIT 500
    ) AS recent
    WHERE recent.rate > 0
      AND CAST(recent.spec AS jsonb) @> CAST(:parts AS jsonb)
    LIMIT 5
    """
)


async def like_jobs(
    session: AsyncSession, owner: str, spec: dict[str, Any], device: str
) -> list[tuple[str, float]]:
    """(job id, tokens per second) of the owner's newest jobs of the same work on this device.

    Work is the same where all parts of the spec agree on which a plan depends (`relevant`).
    """
    values = {"owner": owner, "device": device, "parts": json.dumps(relevant(spec))}
    return [(row.id, row.rate) for row in await session.execute(_LIKE, values)]
