"""The application: its parts put together, and its life."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octrain_api import clocks, docs, health, problems
from octrain_api.artifacts.endpoints import router as artifacts
from octrain_api.attempts.endpoints import router as attempts
from octrain_api.database import Database
from octrain_api.dependencies import Context
from octrain_api.events.endpoints import router as events
from octrain_api.jobs.endpoints import router as jobs
from octrain_api.jobs.stream_endpoints import router as streams
from octrain_api.keys.endpoints import router as keys
from octrain_api.listener import JobListener
from octrain_api.logs.endpoints import router as logs
from octrain_api.metrics.endpoints import router as metrics
from octrain_api.migrate import check_schema
from octrain_api.nodes.endpoints import router as nodes
from octrain_api.settings import Settings

VERSION = "0.1.0"

log = logging.getLogger("octrain_api")


class _BodyTooLarge(Exception):
    pass


class BodyLimit:
    """Refuses request bodies above a bound, by their length or, without one, by counting."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            if seen > self._max_bytes:
                raise problems.Problem(413, "body-too-large", "Body too large", self._text)
            return part

        await self._app(scope, counting, send)

    @property
    def _text(self) -> str:
        return f"A request body has {self._max_bytes} bytes at most."

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        problem = problems.Problem(413, "body-too-large", "Body too large", self._text)
        await problems.response(Request(scope), problem)(scope, receive, send)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application. Its lifespan refuses to start on a wrong schema."""
    settings = settings or Settings()
    database = Database(settings.database, "octrain-api")
    listener = JobListener(database)
    context = Context(settings=settings, database=database, listener=listener)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with database.session() as session:
            await check_schema(session)
        tasks = [
            asyncio.create_task(listener.run()),
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await database.close()

    app = FastAPI(
        title="Octrain",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = context
    api = APIRouter()
    for router in (jobs, streams, events, metrics, logs, artifacts, nodes, attempts, keys):
        api.include_router(router)
    app.include_router(api, prefix="/v1")
    app.include_router(api, include_in_schema=False)
    app.include_router(health.router)
    app.add_middleware(BodyLimit, max_bytes=settings.http.max_body_bytes)
    problems.install(app)
    docs.install(app)
    return app
