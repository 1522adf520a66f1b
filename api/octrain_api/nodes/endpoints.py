"""Nodes over HTTP."""

from fastapi import APIRouter

from octrain_api.auth import NodeWorker, Reader
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.nodes.schemas import (
    NodeHeartbeatAnswer,
    NodeHeartbeatRequest,
    NodeList,
    RegisterAnswer,
    RegisterRequest,
)
from octrain_api.nodes.service import NodeService

router = APIRouter(prefix="/nodes")


@router.get("", tags=["nodes"])
async def list_nodes(session: SessionDep, context: ContextDep, principal: Reader) -> NodeList:
    """Every registered node: what it can do, whether it lives, what is free."""
    return NodeList(items=await NodeService(session, context.settings).list_all())


@router.post("/register", tags=["workers"])
async def register_node(
    body: RegisterRequest, session: SessionDep, context: ContextDep, principal: NodeWorker
) -> RegisterAnswer:
    """Describe this machine; the same name keeps the same id."""
    return await NodeService(session, context.settings).register(body, principal.owner)


@router.post("/{node_id}/heartbeat", tags=["workers"])
async def heartbeat_node(
    node_id: str,
    body: NodeHeartbeatRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> NodeHeartbeatAnswer:
    """The node's worker lives."""
    return await NodeService(session, context.settings).heartbeat(node_id, principal.owner)
