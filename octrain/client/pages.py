"""Lists that a server gives in pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from octrain.client.session import Session


async def each(
    session: Session,
    path: str,
    params: Mapping[str, Any] | None = None,
    limit: int | None = None,
    *,
    page: int = 100,
) -> AsyncGenerator[Any, None]:
    """The items, page by page as they are taken; all of them without ``limit``."""
    asked = dict(params or {})
    left = limit
    while left is None or left > 0:
        asked["limit"] = page if left is None else min(left, page)
        answer = await session.request("GET", path, params=asked)
        items = items_of(answer)
        for item in items[:left]:
            yield item
        left = None if left is None else left - len(items)
        asked["cursor"] = answer.get("next_cursor") if isinstance(answer, dict) else None
        if not asked["cursor"] or not items:
            return


def items_of(answer: Any, name: str = "items") -> list[Any]:
    """The list in an answer that is one, or that holds one."""
    found = answer.get(name, answer.get("items")) if isinstance(answer, dict) else answer
    return found if isinstance(found, list) else []
