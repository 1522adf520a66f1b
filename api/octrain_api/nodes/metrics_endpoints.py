"""Metrics of nodes over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from octrain_api.auth import NodeWorker, Reader
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.nodes.metrics_schemas import NodeMetrics, SamplesAnswer, SamplesRequest
from octrain_api.nodes.metrics_service import NodeMetricService

router = APIRouter(prefix="/nodes")


@router.get("/{node_id}/metrics", tags=["nodes"])
async def read_node_metrics(
    node_id: str,
    session: SessionDep,
    context: ContextDep,
    principal: Reader,
    seconds: Annotated[
        float, Query(gt=0, le=31_622_400, description="how far back, until now")
    ] = 3600,
    max_points: Annotated[
        int, Query(ge=1, le=10_000, description="more samples are given as means")
    ] = 360,
) -> NodeMetrics:
    """What the node's GPUs and its host do: utilisation, memory, power, temperature."""
    service = NodeMetricService(session, context.settings)
    return await service.read(node_id, seconds, max_points)


@router.post("/{node_id}/metrics", tags=["workers"])
async def store_node_metrics(
    node_id: str,
    body: SamplesRequest,
    session: SessionDep,
    context: ContextDep,
    principal: NodeWorker,
) -> SamplesAnswer:
    """The node tells samples; each is stored once."""
    service = NodeMetricService(session, context.settings)
    return SamplesAnswer(stored=await service.store(node_id, principal, body))
