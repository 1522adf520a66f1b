"""Whether this process lives, whether it can serve, and its figures."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from octrain_api.auth import optional_principal
from octrain_api.dependencies import ContextDep
from octrain_api.keys.principal import Principal
from octrain_api.problems import Problem

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class ReadinessAnswer(BaseModel):
    """Each part of the service: `ok`, or what is wrong with it."""

    status: str = Field(description="ready, degraded (jobs are taken, but may wait), or not ready")
    checks: dict[str, str]


@router.get("/healthz")
async def healthz() -> Health:
    """Answers while the process lives, whatever the database does."""
    return Health()


@router.get("/readyz", responses={503: {"model": ReadinessAnswer}})
async def readyz(response: Response, context: ContextDep) -> ReadinessAnswer:
    """Asks the database and compares its schema; 503 when this process cannot serve.

    A controller or a broker that is away is told, but is no 503: jobs are still taken.
    """
    found = await context.readiness.check()
    response.status_code = 200 if found.can_serve else 503
    return ReadinessAnswer(status=found.status, checks=found.checks)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text format"}},
)
async def prometheus_metrics(
    request: Request,
    context: ContextDep,
    principal: Annotated[Principal | None, Depends(optional_principal)],
) -> Response:
    """Figures of this process and of the service, for Prometheus. Needs the scope `admin`, unless
    the operator opened it (`OCTRAIN_PROMETHEUS_ACCESS=open`)."""
    if context.settings.prometheus.access != "open":
        if principal is None:
            raise Problem(
                401,
                "not-authenticated",
                "Not authenticated",
                "Send an API key of the scope admin: `Authorization: Bearer oct_...`.",
                headers={"WWW-Authenticate": 'Bearer realm="octrain"'},
            )
        if not principal.is_admin:
            raise Problem(
                403,
                "scope-missing",
                "Not allowed",
                "This key lacks the scope 'admin'.",
                required_scope="admin",
            )
    return Response(await context.scrape.text(), media_type=CONTENT_TYPE_LATEST)
