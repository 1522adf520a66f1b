"""Metrics over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from octrain_api.dependencies import SessionDep
from octrain_api.jobs.access import VisibleJob
from octrain_api.metrics.schemas import SeriesList
from octrain_api.metrics.service import MetricService

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get("/{job_id}/metrics")
async def read_metrics(
    job: VisibleJob,
    session: SessionDep,
    keys: Annotated[
        str | None, Query(max_length=65_536, description="names, separated by commas; all without")
    ] = None,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    from_step: Annotated[int, Query(ge=0, le=2**62)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    max_points: Annotated[
        int | None,
        Query(ge=3, le=1_000_000, description="keeps the least, greatest and last of each bucket"),
    ] = None,
) -> SeriesList:
    """Series of the job. A step that a later attempt repeated is shown as the later one had it."""
    names = [name for name in keys.split(",") if name] if keys is not None else None
    series = await MetricService(session).read(
        job.id, names, attempt, from_step, to_step, max_points
    )
    return SeriesList(series=series)
