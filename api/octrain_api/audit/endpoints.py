"""The audit log over HTTP, for administrators."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from octrain_api.audit.repository import AuditFilter, AuditRepository
from octrain_api.audit.schemas import AuditList, AuditObject
from octrain_api.auth import Admin
from octrain_api.dependencies import SessionDep
from octrain_api.models import AuditEntry
from octrain_api.pagination import cut, decode_cursor, encode_cursor
from octrain_api.times import WrittenAwareTime

router = APIRouter(prefix="/audit", tags=["operations"])

Name = Annotated[str | None, Query(max_length=200)]


@router.get("")
async def list_audit_entries(
    session: SessionDep,
    principal: Admin,
    owner: Name = None,
    key_id: Name = None,
    target: Name = None,
    outcome: Annotated[Literal["done", "refused", "failed"] | None, Query()] = None,
    since: Annotated[WrittenAwareTime | None, Query(description="at or after")] = None,
    until: Annotated[WrittenAwareTime | None, Query(description="before")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> AuditList:
    """Who changed what, when, from where and with what outcome, newest first."""
    wanted = AuditFilter(owner, key_id, target, outcome, since, until)
    after = None
    if cursor is not None:
        time, identifier = decode_cursor(cursor)
        after = (time, int(identifier) if identifier.isdigit() else 0)
    rows = await AuditRepository(session).page(wanted, limit + 1, after)
    page = rows[:limit]
    more = cut(rows, limit)
    return AuditList(
        items=[_audit_object(row) for row in page],
        next_cursor=encode_cursor(page[-1].time, str(page[-1].id)) if more else None,
    )


def _audit_object(row: AuditEntry) -> AuditObject:
    return AuditObject(
        id=row.id,
        time=row.time,
        key_id=row.key_id,
        owner=row.owner,
        address=row.address,
        request_id=row.request_id,
        method=row.method,
        route=row.route,
        target=row.target,
        status=row.status,
        outcome=row.outcome,
    )
