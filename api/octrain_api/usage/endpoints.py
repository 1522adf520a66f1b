"""Use and quotas over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Path

from octrain_api.auth import Admin, Reader
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.usage.schemas import OwnerQuotas, OwnerQuotasList, Quotas, UsageObject
from octrain_api.usage.service import UsageService

router = APIRouter(tags=["usage"])

Owner = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/usage")
async def get_usage(session: SessionDep, context: ContextDep, principal: Reader) -> UsageObject:
    """What the key's owner uses now, has used within the window, and may use."""
    return await UsageService(session, context.settings.quotas).usage(principal.owner)


@router.get("/usage/{owner}")
async def get_owner_usage(
    owner: Owner, session: SessionDep, context: ContextDep, principal: Admin
) -> UsageObject:
    """The same of any owner."""
    return await UsageService(session, context.settings.quotas).usage(owner)


@router.get("/quotas")
async def list_quotas(
    session: SessionDep, context: ContextDep, principal: Admin
) -> OwnerQuotasList:
    """The default quotas, and every owner who has others."""
    return await UsageService(session, context.settings.quotas).list_quotas()


@router.put("/quotas/{owner}")
async def set_quotas(
    owner: Owner, body: Quotas, session: SessionDep, context: ContextDep, principal: Admin
) -> OwnerQuotas:
    """Give an owner quotas in place of the default; what is not named has no limit."""
    return await UsageService(session, context.settings.quotas).set_quotas(owner, body)


@router.delete("/quotas/{owner}")
async def remove_quotas(
    owner: Owner, session: SessionDep, context: ContextDep, principal: Admin
) -> Quotas:
    """Give the owner the default again, which is the answer."""
    return await UsageService(session, context.settings.quotas).remove_quotas(owner)
