"""The two clients: one that waits, and one for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx

from octrain.client.administration import AsyncKeys, AsyncOperations
from octrain.client.async_jobs import AsyncJobs
from octrain.client.blocking import iterating, waiting
from octrain.client.connection import find_connection, trusted
from octrain.client.datasets import Dataset, Datasets, OnUpload
from octrain.client.events import follow
from octrain.client.http import AsyncExchange, BlockingExchange, drive, iterate
from octrain.client.jobs import Jobs
from octrain.client.library import AsyncRecipes, AsyncWebhooks
from octrain.client.models import StreamEvent
from octrain.client.session import RETRIES, Session
from octrain.client.transport import LoopTransport, Transport

T = TypeVar("T")


class AsyncClient:
    """A connection to an Octrain server, for asyncio.

    ``url`` and ``key`` default to OCTRAIN_API_URL and OCTRAIN_API_KEY, then to the local stack of
    this machine. ``timeout`` (seconds) is that of one request, ``retries`` how often one is tried
    again. ``ca_file`` (or OCTRAIN_CA_FILE) names the certificates of an authority of your own.
    ``http`` is an httpx client of your own (proxies, certificates), which stays open.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = RETRIES,
        ca_file: str | Path | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        connection = find_connection(url, key)
        self._own = http is None
        http = http or httpx.AsyncClient(timeout=timeout, verify=trusted(ca_file))
        self._session = Session(connection, AsyncExchange(http), retries=retries)
        operations = AsyncOperations(self._session)
        self.jobs = AsyncJobs(self._session)
        self.datasets = AsyncDatasets(self._session)
        self.recipes = AsyncRecipes(self._session)
        self.webhooks = AsyncWebhooks(self._session)
        self.keys = AsyncKeys(self._session)
        self.nodes = operations.nodes
        self.node_metrics = operations.node_metrics
        self.drain_node = operations.drain_node
        self.undrain_node = operations.undrain_node
        self.release_node = operations.release_node
        self.create_enrolment_token = operations.create_enrolment_token
        self.enrolment_tokens = operations.enrolment_tokens
        self.revoke_enrolment_token = operations.revoke_enrolment_token
        self.readiness = operations.readiness
        self.usage = operations.usage
        self.quotas = operations.quotas
        self.set_quotas = operations.set_quotas
        self.reset_quotas = operations.reset_quotas
        self.audit = operations.audit

    @property
    def url(self) -> str:
        return self._session.connection.url

    def events(self, *, after: int | str | None = None) -> AsyncIterator[StreamEvent]:
        """What happens to all jobs of this key, live and without end; ``data["job_id"]`` says to
        which. ``after`` is an event's ``id`` to go on from, or 0 for everything so far."""
        return follow(self._session, "/events/stream", after=after)

    async def create_key(
        self, name: str, owner: str, scopes: Sequence[str], *, node: str | None = None
    ) -> str:
        """Make an API key (scope admin); the key alone, as ``keys.create`` gives it."""
        return (await self.keys.create(name, owner, scopes, node=node)).key

    async def close(self) -> None:
        if self._own:
            await self._session.exchange.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"


class Client:
    """A connection to an Octrain server. Not to be shared between threads.

    ``url`` and ``key`` default to OCTRAIN_API_URL and OCTRAIN_API_KEY, then to the local stack of
    this machine. ``timeout`` (seconds) is that of one request, ``retries`` how often one is tried
    again. ``ca_file`` (or OCTRAIN_CA_FILE) names the certificates of an authority of your own.
    ``http`` is an httpx client of your own (proxies, certificates), which stays open.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = RETRIES,
        ca_file: str | Path | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        connection = find_connection(url, key)
        self._own = http is None
        http = http or httpx.Client(timeout=timeout, verify=trusted(ca_file))
        self._session = Session(connection, BlockingExchange(http), retries=retries)
        self._twin = AsyncOperations(self._session)
        self.jobs = Jobs(self._session)
        self.datasets = Datasets(Transport(self._session))
        self.recipes = Recipes(self._session)
        self.webhooks = Webhooks(self._session)
        self.keys = Keys(self._session)

    nodes = waiting(AsyncOperations.nodes)
    node_metrics = waiting(AsyncOperations.node_metrics)
    drain_node = waiting(AsyncOperations.drain_node)
    undrain_node = waiting(AsyncOperations.undrain_node)
    release_node = waiting(AsyncOperations.release_node)
    create_enrolment_token = waiting(AsyncOperations.create_enrolment_token)
    enrolment_tokens = waiting(AsyncOperations.enrolment_tokens)
    revoke_enrolment_token = waiting(AsyncOperations.revoke_enrolment_token)
    readiness = waiting(AsyncOperations.readiness)
    usage = waiting(AsyncOperations.usage)
    quotas = waiting(AsyncOperations.quotas)
    set_quotas = waiting(AsyncOperations.set_quotas)
    reset_quotas = waiting(AsyncOperations.reset_quotas)
    audit = iterating(AsyncOperations.audit)

    @property
    def url(self) -> str:
        return self._session.connection.url

    def events(self, *, after: int | str | None = None) -> Iterator[StreamEvent]:
        """What happens to all jobs of this key, live and without end; ``data["job_id"]`` says to
        which. ``after`` is an event's ``id`` to go on from, or 0 for everything so far."""
        return iterate(follow(self._session, "/events/stream", after=after))

    def create_key(
        self, name: str, owner: str, scopes: Sequence[str], *, node: str | None = None
    ) -> str:
        """Make an API key (scope admin); the key alone, as ``keys.create`` gives it."""
        return self.keys.create(name, owner, scopes, node=node).key

    def close(self) -> None:
        if self._own:
            drive(self._session.exchange.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"


class Keys:
    """``client.keys``: API keys, for administrators."""

    def __init__(self, session: Session) -> None:
        self._twin = AsyncKeys(session)

    create = waiting(AsyncKeys.create)
    own = waiting(AsyncKeys.own)
    get = waiting(AsyncKeys.get)
    edit = waiting(AsyncKeys.edit)
    rotate = waiting(AsyncKeys.rotate)
    revoke = waiting(AsyncKeys.revoke)
    list = iterating(AsyncKeys.list)


class Recipes:
    """``client.recipes``: the service's presets and one's own named recipes."""

    def __init__(self, session: Session) -> None:
        self._twin = AsyncRecipes(session)

    get = waiting(AsyncRecipes.get)
    versions = waiting(AsyncRecipes.versions)
    save = waiting(AsyncRecipes.save)
    withdraw = waiting(AsyncRecipes.withdraw)
    list = iterating(AsyncRecipes.list)


class Webhooks:
    """``client.webhooks``: endpoints that are told of one's own jobs."""

    def __init__(self, session: Session) -> None:
        self._twin = AsyncWebhooks(session)

    create = waiting(AsyncWebhooks.create)
    get = waiting(AsyncWebhooks.get)
    edit = waiting(AsyncWebhooks.edit)
    delete = waiting(AsyncWebhooks.delete)
    rotate = waiting(AsyncWebhooks.rotate)
    test = waiting(AsyncWebhooks.test)
    deliveries = iterating(AsyncWebhooks.deliveries)
    delivery = waiting(AsyncWebhooks.delivery)
    redeliver = waiting(AsyncWebhooks.redeliver)
    redeliver_failed = waiting(AsyncWebhooks.redeliver_failed)
    list = iterating(AsyncWebhooks.list)


class AsyncDatasets:
    """``client.datasets``: files are read and hashed in a thread, requests go over the loop."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def upload(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        media: str | None = None,
        format: str = "text",
        columns: Mapping[str, str] | None = None,
        progress: OnUpload | None = None,
        wait: bool = True,
        patience_seconds: float = 60.0,
    ) -> Dataset:
        """As ``Datasets.upload``. ``progress`` is called in a thread."""
        return await self._in_thread(
            lambda datasets: datasets.upload(
                path,
                name=name,
                media=media,
                format=format,
                columns=columns,
                progress=progress,
                wait=wait,
                patience_seconds=patience_seconds,
            )
        )

    async def get(self, dataset_id: str) -> Dataset:
        """The data set with this id. Errors: NotFound."""
        return await self._in_thread(lambda datasets: datasets.get(dataset_id))

    async def wait(self, dataset_id: str) -> Dataset:
        """The data set when it has been checked. Errors: DatasetInvalid."""
        return await self._in_thread(lambda datasets: datasets.wait(dataset_id))

    async def list(
        self, *, status: str | None = None, name: str | None = None
    ) -> AsyncIterator[Dataset]:
        """Data sets, the newest first."""
        for one in await self._in_thread(lambda d: [*d.list(status=status, name=name)]):
            yield one

    async def delete(self, dataset_id: str) -> None:
        """Delete it. Errors: Conflict while a job that has not ended reads it."""
        await self._in_thread(lambda datasets: datasets.delete(dataset_id))

    async def _in_thread(self, function: Callable[[Datasets], T]) -> T:
        transport = LoopTransport(self._session, asyncio.get_running_loop())
        try:
            return await asyncio.to_thread(function, Datasets(transport))
        finally:
            transport.end()
