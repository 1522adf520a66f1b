"""Enrolment of nodes over HTTP: an administrator makes a token, a machine exchanges it."""

from fastapi import APIRouter, Request, Response

from octrain_api.audit.recording import note_target, record_enrolment
from octrain_api.auth import Admin
from octrain_api.dependencies import SessionDep
from octrain_api.idempotency.once import OnceDep
from octrain_api.keys.enrolment import EnrolmentService
from octrain_api.keys.schemas import (
    EnrolAnswer,
    EnrolRequest,
    NewTokenObject,
    TokenList,
    TokenObject,
    TokenRequest,
)

router = APIRouter(prefix="/nodes")


@router.post("/tokens", status_code=201, tags=["nodes"])
async def create_enrolment_token(
    body: TokenRequest,
    request: Request,
    response: Response,
    session: SessionDep,
    principal: Admin,
    once: OnceDep,
) -> NewTokenObject:
    """Make a token with which one machine gets the key of its node; shown here once."""
    await once.refuse_earlier("token", "DELETE /nodes/tokens/{id} ends it; make another.")
    made = await EnrolmentService(session).create(body, principal.owner)
    await once.made(made.id)
    note_target(request, made.id)
    response.headers["Cache-Control"] = "no-store"
    return made


@router.get("/tokens", tags=["nodes"])
async def list_enrolment_tokens(session: SessionDep, principal: Admin) -> TokenList:
    """The newest 500 tokens, without their secrets."""
    return TokenList(items=await EnrolmentService(session).list_newest(500))


@router.delete("/tokens/{token_id}", tags=["nodes"])
async def revoke_enrolment_token(
    token_id: str, session: SessionDep, principal: Admin
) -> TokenObject:
    """End a token that has not been used. The key that a used one gave is revoked as a key."""
    return await EnrolmentService(session).revoke(token_id)


@router.post("/enrol", status_code=201, tags=["workers"])
async def enrol_node(
    body: EnrolRequest, request: Request, response: Response, session: SessionDep
) -> EnrolAnswer:
    """Exchange a one-time token, which stands in the body, for the key of the node."""
    made = await EnrolmentService(session).enrol(body)
    await record_enrolment(session, request, made.id, made.owner, body.node)
    response.headers["Cache-Control"] = "no-store"
    return EnrolAnswer(key_id=made.id, node=body.node, key=made.key)
