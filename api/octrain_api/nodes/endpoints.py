"""Nodes over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from octrain_api.auth import Admin, NodeWorker, Reader
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.nodes.schemas import (
    NodeHeartbeatAnswer,
    NodeHeartbeatRequest,
    NodeList,
    NodeObject,
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
    return await NodeService(session, context.settings).register(body, principal)


@router.post("/{node_id}/heartbeat", tags=["workers"])
async def heartbeat_node(
    node_id: str,
    body: NodeHeartbeatRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> NodeHeartbeatAnswer:
    """The node's worker lives. The answer names attempts it should have begun, and leftovers."""
    service = NodeService(session, context.settings)
    return await service.heartbeat(node_id, principal.node, body)


@router.post("/{node_id}/drain", tags=["nodes"])
async def drain_node(
    node_id: str,
    session: SessionDep,
    context: ContextDep,
    principal: Admin,
    release: Annotated[
        bool, Query(description="send its jobs back to the queue too; they save first")
    ] = False,
) -> NodeObject:
    """Give the node no more jobs. Those on it run to their end, unless `release` is true."""
    service = NodeService(session, context.settings)
    return await service.drain(node_id, release, f"user:{principal.owner}")


@router.post("/{node_id}/undrain", tags=["nodes"])
async def undrain_node(
    node_id: str, session: SessionDep, context: ContextDep, principal: Admin
) -> NodeObject:
    """Give the node jobs again."""
    return await NodeService(session, context.settings).undrain(node_id)


@router.post("/{node_id}/release", tags=["nodes"])
async def release_node(
    node_id: str, session: SessionDep, context: ContextDep, principal: Admin
) -> NodeObject:
    """Give jobs again to a node that was set aside for repeated faults."""
    return await NodeService(session, context.settings).release(node_id)
