"""One job as readers get it, and the wait for its next change."""

import asyncio
import time
from dataclasses import dataclass
from zlib import crc32

from fastapi import Response

from octrain_api.database import Database
from octrain_api.jobs.rows import JobRow, JobRows
from octrain_api.jobs.tags import CACHE_CONTROL, JobTag, JobTags, matches
from octrain_api.jobs.transitions import Status
from octrain_api.jobs.views import detail_of
from octrain_api.listener import JOB_CHANNEL, JobListener, wait_for

# Characters of an If-None-Match header.
LONGEST_TAGS = 4096


@dataclass(frozen=True)
class JobView:
    """A job at one moment, as JSON. `waits` changes with its place in the queue alone."""

    owner: str
    version: int
    waits: int
    body: bytes

    @property
    def etag(self) -> str:
        """Changes with whatever a reader can see."""
        return f'"{self.version}-{self.waits:08x}"'


@dataclass(frozen=True)
class Known:
    """What a reader has already: a version, or tags in the words of If-None-Match."""

    version: int | None = None
    tags: str | None = None

    def is_all_of(self, view: JobView, first: JobView) -> bool:
        """Whether the reader would learn nothing from this view.

        A version says nothing of the place in the queue: what has changed of that since `first`,
        the view that the reader's request found, is news.
        """
        if self.tags is not None and not matches(self.tags, view.etag):
            return False
        if self.version is None:
            return self.tags is not None
        return view.version <= self.version and view.waits == first.waits


class JobReader:
    """Reads jobs for the readers of one process."""

    def __init__(self, database: Database, listener: JobListener, tags: JobTags) -> None:
        self._database = database
        self._listener = listener
        self._tags = tags
        self._running: dict[str, asyncio.Task[JobView | None]] = {}
        listener.on_change(JOB_CHANNEL, self._share_no_more)

    async def read(self, job_id: str) -> JobView | None:
        """The job as it is committed now."""
        with self._tags.reading(job_id) as reading:
            async with self._database.direct() as connection:
                found = await JobRows(connection).get(job_id)
            if found is None:
                return None
            view = _view(found)
            if found.status != Status.QUEUED:
                reading.keep(JobTag(view.owner, view.etag))
        return view

    async def read_after_change(
        self, job_id: str, known: Known, seconds: float, poll: float, visible_to: str | None
    ) -> JobView | None:
        """The job once it is not what the reader knows, or after so many seconds.

        None if there is none, or if it is not of the owner `visible_to`. No connection is held
        while waiting, and readers who wait for the same job share one read.
        """
        deadline = time.monotonic() + seconds
        first: JobView | None = None
        with self._listener.subscribe(job_id) as changed:
            while True:
                view = await self._shared(job_id)
                if view is None or visible_to not in (None, view.owner):
                    return None
                first = first or view
                left = deadline - time.monotonic()
                if not known.is_all_of(view, first) or left <= 0 or self._listener.closing.is_set():
                    return view
                await wait_for(changed, min(left, poll))

    async def _shared(self, job_id: str) -> JobView | None:
        """The job, by a read that began after the last change that has been heard of."""
        running = self._running.get(job_id)
        if running is None or running.done():
            running = self._running[job_id] = asyncio.create_task(self.read(job_id))
            running.add_done_callback(lambda task: self._ended(job_id, task))
        return await asyncio.shield(running)

    def _ended(self, job_id: str, task: asyncio.Task[JobView | None]) -> None:
        if self._running.get(job_id) is task:
            del self._running[job_id]

    def _share_no_more(self, job_id: str | None) -> None:
        if job_id is None:
            self._running.clear()
        else:
            self._running.pop(job_id, None)


def _view(found: JobRow) -> JobView:
    waits = crc32(f"{found.position} {found.as_of} {found.waiting_for}".encode())
    return JobView(found.owner, found.version, waits, detail_of(found).encode())


def conditional(body: bytes, etag: str, if_none_match: str | None) -> Response:
    """200 with the body, or 304 for a reader who has it."""
    headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL}
    if if_none_match is not None and matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
