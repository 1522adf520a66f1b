"""The application: its parts put together, and its life."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

from fastapi import APIRouter, Depends, FastAPI, Request

from octrain_api import clocks, docs, health, problem_pages, problems
from octrain_api.admission import Admission
from octrain_api.artifacts.endpoints import router as artifacts
from octrain_api.attempts.endpoints import router as attempts
from octrain_api.audit.endpoints import router as audit
from octrain_api.audit.recording import record_refusal
from octrain_api.dashboard import endpoints as dashboard
from octrain_api.database import Database
from octrain_api.datasets.endpoints import router as datasets
from octrain_api.dependencies import Context
from octrain_api.events.endpoints import router as events
from octrain_api.events.stream_endpoints import router as event_streams
from octrain_api.guard import RequestGuard
from octrain_api.jobs.direct import DirectRequests
from octrain_api.jobs.endpoints import router as jobs
from octrain_api.jobs.list_endpoints import router as job_lists
from octrain_api.jobs.management_endpoints import router as job_management
from octrain_api.jobs.reading import JobReader
from octrain_api.jobs.stream_endpoints import router as streams
from octrain_api.jobs.tags import ConditionalReads, JobTags
from octrain_api.jobs.together import StoredTogether
from octrain_api.json_bodies import JsonBodies
from octrain_api.keys.endpoints import router as keys
from octrain_api.keys.enrolment_endpoints import router as enrolment
from octrain_api.keys.last_use import LastUse
from octrain_api.keys.principals import Principals
from octrain_api.listener import JobListener
from octrain_api.logs.endpoints import router as logs
from octrain_api.metrics.direct import DirectMetrics
from octrain_api.metrics.endpoints import router as metrics
from octrain_api.metrics.layouts import KnownLayouts
from octrain_api.migrate import check_schema
from octrain_api.nodes.endpoints import router as nodes
from octrain_api.nodes.metrics_endpoints import router as node_metrics
from octrain_api.observability.measures import Measures
from octrain_api.observability.middleware import RequestObserver
from octrain_api.observability.scrape import Scrape
from octrain_api.observability.tracer import make_tracing
from octrain_api.plans.endpoints import router as plans
from octrain_api.query_names import refuse_unknown_names
from octrain_api.rate_limits.limiter import RateLimiter
from octrain_api.readiness import Readiness
from octrain_api.recipes.endpoints import router as recipes
from octrain_api.sessions.endpoints import router as sessions
from octrain_api.sessions.holders import SessionHolders
from octrain_api.settings import Settings
from octrain_api.streaming.hub import Streams
from octrain_api.tasks import end_tasks
from octrain_api.usage.endpoints import router as usage
from octrain_api.webhooks.endpoints import router as webhooks

VERSION = "0.1.0"


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application. Its lifespan refuses to start on a wrong schema."""
    settings = settings or Settings()
    database = Database(settings.database, "octrain-api")
    listener = JobListener(database, settings.http.stream_poll)
    principals, tags = Principals(database, listener), JobTags(listener)
    holders = SessionHolders(database, listener)
    measures, last_use = Measures(), LastUse(database, settings.keys.last_use_interval)
    live = Streams(database, listener, settings.http)
    tracing = make_tracing(settings.tracing, "octrain-api")
    context = Context(
        measures=measures,
        tracing=tracing,
        readiness=Readiness(database, settings),
        scrape=Scrape(
            database,
            measures,
            heartbeat_ttl=settings.controller.heartbeat_ttl,
            silence_allowed=settings.controller.downtime_tolerance,
            streams=lambda: live.open_streams,
        ),
        settings=settings,
        database=database,
        listener=listener,
        principals=principals,
        sessions=holders,
        jobs=JobReader(database, listener, tags),
        new_jobs=StoredTogether(database.direct),
        streams=live,
        layouts=KnownLayouts(),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with database.session() as session:
            await check_schema(session)
        # Noted before the first request: what it is told may show that the API had been away.
        async with database.transaction() as session:
            await clocks.beat(session, clocks.API, settings.controller.downtime_tolerance)
        tasks = [
            asyncio.create_task(listener.run()),
            asyncio.create_task(last_use.write_for_ever()),
            asyncio.create_task(database.silence.run()),
            asyncio.create_task(
                clocks.beat_for_ever(
                    database,
                    clocks.API,
                    settings.http.alive_interval,
                    settings.controller.downtime_tolerance,
                )
            ),
        ]
        try:
            yield
        finally:
            listener.close()
            await end_tasks(tasks)
            await asyncio.to_thread(tracing.close)
            await database.close()

    app = FastAPI(
        title="Octrain",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    # Including them anew would make them anew.
    app.router.routes.extend(_endpoints().routes)

    async def afterwards(request: Request, status: int) -> None:
        await record_refusal(database, request, status)

    # The last one is the outermost.
    app.add_middleware(DirectMetrics, context=context)
    app.add_middleware(DirectRequests, context=context)
    app.add_middleware(ConditionalReads, holder=principals.known, tags=tags)
    app.add_middleware(JsonBodies)
    app.add_middleware(
        Admission,
        settings=settings.rate_limits,
        principals=principals,
        sessions=holders,
        origins=settings.sessions.origins,
        limiter=RateLimiter(database),
        last_use=last_use,
        measures=measures,
    )
    app.add_middleware(RequestGuard, settings=settings.http)
    app.add_middleware(
        RequestObserver,
        settings=settings.logs,
        measures=measures,
        tracing=tracing,
        afterwards=afterwards,
    )
    problems.install(app)
    docs.install(app)
    dashboard.install(app, settings.dashboard)
    return app


@functools.cache
def _endpoints() -> APIRouter:
    """Every endpoint, below ``/v1`` and, unlisted, below ``/``; made once in a process.

    To make and first to use two hundred routes takes a third of a second, and they know nothing
    of the application that they serve but what a request brings.
    """
    api = APIRouter()
    for router in (jobs, streams, events, metrics, logs, artifacts, nodes, attempts, keys, recipes):
        api.include_router(router)
    api.include_router(event_streams)
    api.include_router(node_metrics)
    api.include_router(enrolment)
    api.include_router(sessions)
    api.include_router(audit)
    api.include_router(usage)
    api.include_router(webhooks)
    api.include_router(datasets)
    api.include_router(plans)
    api.include_router(job_lists)
    api.include_router(job_management)
    # Not of the dashboard: what stands in the addresses of its pages is the browser's affair.
    endpoints = APIRouter(
        dependencies=[Depends(refuse_unknown_names)],
        generate_unique_id_function=lambda route: route.name,
    )
    endpoints.include_router(api, prefix="/v1")
    endpoints.include_router(api, include_in_schema=False)
    endpoints.include_router(health.router)
    endpoints.include_router(problem_pages.router)
    return endpoints
