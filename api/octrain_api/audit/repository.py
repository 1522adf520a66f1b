"""The audit log in the database."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.models import AuditEntry


@dataclass(frozen=True)
class AuditFilter:
    """What a list is narrowed to."""

    owner: str | None = None
    key_id: str | None = None
    target: str | None = None
    outcome: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class AuditRepository:
    """Reads the audit log."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def page(
        self, wanted: AuditFilter, limit: int, after: tuple[datetime, int] | None
    ) -> Sequence[AuditEntry]:
        """Up to `limit` entries, newest first, older than the entry `after`."""
        statement = select(AuditEntry).order_by(AuditEntry.time.desc(), AuditEntry.id.desc())
        for column, value in (
            (AuditEntry.owner, wanted.owner),
            (AuditEntry.key_id, wanted.key_id),
            (AuditEntry.target, wanted.target),
            (AuditEntry.outcome, wanted.outcome),
        ):
            if value is not None:
                statement = statement.where(column == value)
        if wanted.since is not None:
            statement = statement.where(AuditEntry.time >= wanted.since)
        if wanted.until is not None:
            statement = statement.where(AuditEntry.time < wanted.until)
        if after is not None:
            statement = statement.where(tuple_(AuditEntry.time, AuditEntry.id) < after)
        return (await self._session.scalars(statement.limit(limit))).all()
