"""The ETags of jobs, kept while they are certain, and 304 for those who have the newest already.

Most polls find nothing new. They are answered before anything else of the application runs, from
two facts kept in memory: who holds the key, and what the job's newest tag is. Whatever is not
certain goes the long way and is read from the database. So only "unchanged" can be late: by
milliseconds while changes are heard, and by 2 seconds at most (`JobListener.is_current`). Queued
jobs are not kept: their place in the queue depends on other jobs.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from octrain_api.caching import Cache, Reading
from octrain_api.keys.principal import Principal
from octrain_api.keys.principal import Scope as KeyScope
from octrain_api.listener import JOB_CHANNEL, JobListener

_SECONDS = 30.0
_SIZE = 20_000
_PATH = re.compile(r"(?:/v1)?/jobs/([A-Za-z0-9_]{1,64})")

CACHE_CONTROL = "private, no-cache"


@dataclass(frozen=True, slots=True)
class JobTag:
    """Whose job it is, and the ETag of its newest state."""

    owner: str
    etag: str


class JobTags:
    """The newest tags by job."""

    def __init__(self, listener: JobListener) -> None:
        self._known: Cache[JobTag] = Cache(
            lambda: listener.is_current, seconds=_SECONDS, size=_SIZE
        )
        listener.on_change(JOB_CHANNEL, self._known.forget)

    def known(self, job_id: str) -> JobTag | None:
        """The tag, if it is certain."""
        return self._known.get(job_id)

    def reading(self, job_id: str) -> AbstractContextManager[Reading[JobTag]]:
        """Around a read of the job."""
        return self._known.reading(job_id)


def matches(if_none_match: str, etag: str) -> bool:
    """Whether an If-None-Match header names this tag (RFC 9110 13.1.2: the weak comparison)."""
    return any(
        tag.strip().removeprefix("W/") in (etag.removeprefix("W/"), "*")
        for tag in if_none_match.split(",")
    )


class ConditionalReads:
    """Answers 304 to `GET /jobs/{id}` with If-None-Match where key and tag are certain."""

    def __init__(
        self, app: ASGIApp, *, holder: Callable[[str], Principal | None], tags: JobTags
    ) -> None:
        self._app = app
        self._holder = holder
        self._tags = tags

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        etag = self._unchanged(scope)
        if etag is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"etag", etag.encode()), (b"cache-control", CACHE_CONTROL.encode())]
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _unchanged(self, scope: Scope) -> str | None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope.get("query_string"):
            return None
        path = _PATH.fullmatch(scope["path"])
        if path is None:
            return None
        headers = dict(scope["headers"])
        wanted, credentials = headers.get(b"if-none-match"), headers.get(b"authorization")
        tag = self._tags.known(path[1]) if wanted is not None else None
        if tag is None or wanted is None:
            return None
        if credentials is None:
            # Admission has just found the holder of the request's session.
            holder = scope.get("state", {}).get("principal")
        else:
            scheme, _, key = credentials.partition(b" ")
            if scheme.lower() != b"bearer":
                return None
            holder = self._holder(key.strip().decode("latin-1"))
        if holder is None:
            return None
        if not (holder.may(KeyScope.JOBS_READ) and holder.sees(tag.owner)):
            return None
        return tag.etag if matches(wanted.decode("latin-1"), tag.etag) else None
