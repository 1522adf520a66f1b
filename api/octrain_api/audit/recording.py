"""Who changed what: written with the change itself, or after the refusal.

A change and its entry are one transaction, so there is none without the other. What was refused
changed nothing; its entry is written once the answer is out. Workers' own calls are not recorded:
the events of jobs tell them.
"""

import logging
from typing import Any

from sqlalchemy import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request

from octrain_api.database import Database
from octrain_api.keys.principal import Principal, Scope
from octrain_api.models import AuditEntry
from octrain_api.observability.middleware import route_of

log = logging.getLogger("octrain_api.audit")

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
# Asked by POST because of their bodies, but nothing changes.
_ASKING = frozenset({"/jobs:validate"})
_TARGETS = ("job_id", "key_id", "node_id", "token_id", "webhook_id", "name", "owner")
# Not recorded: a flood of them must not become a flood of rows.
_UNRECORDED = frozenset({401, 429})


def note_target(request: Request, target: str) -> None:
    """Say what a change is about, where the path does not: the thing that was made."""
    request.state.audit_target = target


def _recorded_holder(request: Request) -> Principal | None:
    """Whose request it is, if it is to be recorded."""
    principal = getattr(request.state, "principal", None)
    if request.method in _READS or not isinstance(principal, Principal):
        return None
    if Scope.NODE in principal.scopes or route_of(request.scope) in _ASKING:
        return None
    return principal


async def record_change(session: AsyncSession, request: Request) -> None:
    """Add the entry of a change to its transaction, unless it has been written with the change."""
    if getattr(request.state, "audit_is_written", False):
        return
    entry = entry_of_change(request)
    if entry is not None:
        await session.execute(insert(AuditEntry).values(entry))


def entry_of_change(request: Request) -> dict[str, Any] | None:
    """The entry of a change, if it is to be recorded, by the columns of the log."""
    holder = _recorded_holder(request)
    if holder is None:
        return None
    status = getattr(request.scope.get("route"), "status_code", None) or 200
    return _entry(request, status, "done", holder.key_id, holder.owner)


def note_written(request: Request) -> None:
    """Say that a change and its entry were written in one statement."""
    request.state.audit_is_written = True


async def record_enrolment(
    session: AsyncSession, request: Request, key_id: str, owner: str, node: str
) -> None:
    """Add the entry of an enrolment: its token is no key, so the key that it gave is named."""
    note_target(request, node)
    await _write(session, request, 201, "done", key_id, owner)


async def record_refusal(database: Database, request: Request, status: int) -> None:
    """Write the entry of a change that was refused, or that failed."""
    holder = _recorded_holder(request)
    if status < 400 or status in _UNRECORDED or holder is None:
        return
    outcome = "refused" if status < 500 else "failed"
    try:
        async with database.transaction() as session:
            await _write(session, request, status, outcome, holder.key_id, holder.owner)
    except (SQLAlchemyError, OSError) as error:
        log.error("a refusal could not be written to the audit log: %s", error)


async def _write(
    session: AsyncSession, request: Request, status: int, outcome: str, key_id: str, owner: str
) -> None:
    entry = _entry(request, status, outcome, key_id, owner)
    await session.execute(insert(AuditEntry).values(entry))


def _entry(request: Request, status: int, outcome: str, key_id: str, owner: str) -> dict[str, Any]:
    return {
        "key_id": key_id,
        "owner": owner,
        "address": request.client.host if request.client is not None else None,
        "request_id": getattr(request.state, "request_id", ""),
        "method": request.method,
        "route": route_of(request.scope),
        "target": _target(request),
        "status": status,
        "outcome": outcome,
    }


def _target(request: Request) -> str | None:
    noted = getattr(request.state, "audit_target", None)
    if noted is not None:
        return str(noted)
    parameters = request.scope.get("path_params") or {}
    for name in _TARGETS:
        if name in parameters:
            return str(parameters[name])[:200]
    return None
