"""Whether this process lives, and whether it can serve."""

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.dependencies import ContextDep
from octrain_api.migrate import SchemaMismatch, check_schema

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Each part that this process needs to serve."""

    status: Literal["ready", "not ready"]
    checks: dict[str, str]


@router.get("/healthz")
async def healthz() -> Health:
    """Answers while the process lives, whatever the database does."""
    return Health()


@router.get("/readyz", responses={503: {"model": Readiness}})
async def readyz(response: Response, context: ContextDep) -> Readiness:
    """Asks the database and compares its schema; 503 when this process cannot serve."""
    checks = {"database": "ok", "schema": "ok"}
    try:
        async with context.database.session() as session:
            await session.execute(text("SELECT 1"))
            try:
                await check_schema(session)
            except SchemaMismatch as error:
                checks["schema"] = str(error)
    except (SQLAlchemyError, OSError):
        checks = {"database": "cannot be reached", "schema": "unknown"}
    ready = all(value == "ok" for value in checks.values())
    response.status_code = 200 if ready else 503
    return Readiness(status="ready" if ready else "not ready", checks=checks)
