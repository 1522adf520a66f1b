"""What an endpoint can ask for: the application's context and the session of this request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.audit.recording import record_change
from octrain_api.database import Database
from octrain_api.jobs.reading import JobReader
from octrain_api.jobs.together import StoredTogether
from octrain_api.keys.principals import Principals
from octrain_api.listener import JobListener
from octrain_api.metrics.layouts import KnownLayouts
from octrain_api.observability.measures import Measures
from octrain_api.observability.scrape import Scrape
from octrain_api.observability.tracing import Tracing
from octrain_api.readiness import Readiness
from octrain_api.sessions.holders import SessionHolders
from octrain_api.settings import Settings
from octrain_api.streaming.hub import Streams


@dataclass(frozen=True)
class Context:
    """What lives as long as the process."""

    settings: Settings
    database: Database
    listener: JobListener
    measures: Measures
    readiness: Readiness
    scrape: Scrape
    tracing: Tracing
    principals: Principals
    sessions: SessionHolders
    jobs: JobReader
    new_jobs: StoredTogether
    streams: Streams
    layouts: KnownLayouts


async def get_context(request: Request) -> Context:
    """The context that the application was made with."""
    # Not a plain function: those are called in a thread each.
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


ContextDep = Annotated[Context, Depends(get_context)]


@asynccontextmanager
async def request_session(context: Context, request: Request) -> AsyncIterator[AsyncSession]:
    """One session per request, committed at the end: services never commit.

    A GET sees one moment of the database: a job and its attempts of two moments would contradict
    each other.
    """
    database = context.database
    reads = request.method in ("GET", "HEAD")
    async with database.snapshot() if reads else database.session() as session:
        yield session
        if not reads:
            await record_change(session, request)
        if session.in_transaction():
            await session.commit()
        context.listener.forget_changes_of(session)


async def get_session(context: ContextDep, request: Request) -> AsyncIterator[AsyncSession]:
    """The session of this request, committed when the endpoint returns."""
    async with request_session(context, request) as session:
        yield session


# scope="function": the commit comes before the answer is sent, so that an answer is never a lie.
SessionDep = Annotated[AsyncSession, Depends(get_session, scope="function")]
