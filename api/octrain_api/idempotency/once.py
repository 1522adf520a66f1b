"""`Idempotency-Key`: a request that makes something can be sent again without making it twice.

The first request with a key takes a lock of the database for as long as its transaction; another
one meanwhile is refused with 409 and told to come again. What was made is noted in that same
transaction, so it and its key are there together, or neither is. For 24 hours the same request gets
what was made, as it is then, and another request under the key gets 422.
"""

import hashlib
import json
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import AnyKey, Principal
from octrain_api.dependencies import SessionDep
from octrain_api.idempotency.repository import Claim, IdempotencyRepository, Kept
from octrain_api.problems import Problem, conflict

HEADER = "Idempotency-Key"
LONGEST_KEY = 255
# What a request in flight takes is hardly longer.
_RETRY_AFTER = "1"

IdempotencyKeyHeader = Annotated[
    str | None,
    Header(
        alias=HEADER,
        min_length=1,
        max_length=LONGEST_KEY,
        description="sent again within 24 hours with the same request: what that one made",
    ),
]


class Once:
    """What one request's Idempotency-Key demands; nothing if there is none."""

    def __init__(self, session: AsyncSession, kept: Kept | None) -> None:
        self._repository = IdempotencyRepository(session)
        self.kept = kept
        self.is_replay = False

    async def earlier(self) -> str | None:
        """The identifier of what this request made before, if it did; else it is to be made now.

        Takes the key. 409 while another request has it, 422 if it was used for another request.
        """
        if self.kept is None:
            return None
        return self.judge(await self._repository.claim(self.kept.owner, self.kept.key))

    def judge(self, claim: Claim) -> str | None:
        """What `earlier` says of a claim."""
        if claim.target is not None:
            if self.kept is None or claim.request_hash != self.kept.request_hash:
                raise _used_otherwise(claim.target)
            self.is_replay = True
            return claim.target
        if not claim.is_free:
            raise in_flight()
        return None

    async def refuse_earlier(self, what: str, remedy: str) -> None:
        """As `earlier`, for what is shown once: 409 if it was made before."""
        target = await self.earlier()
        if target is not None:
            raise conflict(
                "secret-shown-once",
                f"An earlier request with this Idempotency-Key made the {what} {target}, and its "
                f"answer alone showed the secret. {remedy}",
                target=target,
            )

    async def made(self, target: str) -> None:
        """Note what was made, before the commit."""
        if self.kept is not None:
            kept = self.kept
            values = {
                "owner": kept.owner,
                "key": kept.key,
                "request_hash": kept.request_hash,
                "target": target,
            }
            if not await self._repository.keep(values):
                raise in_flight()

    def mark(self, response: Response) -> None:
        """Say in the answer that nothing was made by this request."""
        if self.is_replay:
            response.status_code = 200
            response.headers["Idempotent-Replayed"] = "true"


def in_flight() -> Problem:
    """409: another request with this key is at work, or committed at this moment."""
    problem = conflict(
        "idempotency-key-in-flight",
        "A request with this Idempotency-Key is being worked on; send this one again shortly.",
    )
    problem.headers["Retry-After"] = _RETRY_AFTER
    return problem


def _used_otherwise(target: str) -> Problem:
    return Problem(
        422,
        "idempotency-key-reused",
        "Idempotency-Key used before",
        "This Idempotency-Key was sent before with another request; use a new key.",
        target=target,
    )


async def _once(
    request: Request,
    session: SessionDep,
    principal: AnyKey,
    idempotency_key: IdempotencyKeyHeader = None,
) -> Once:
    return once_of(request, session, principal, idempotency_key)


def once_of(request: Request, session: AsyncSession, principal: Principal, key: str | None) -> Once:
    """What this key of the request, if it has one, demands."""
    if key is None:
        return Once(session, None)
    return Once(session, Kept(principal.owner, key, _request_hash(request)))


def _request_hash(request: Request) -> str:
    """Of what the request asks for: path, query and JSON, however that is written."""
    query = request.query_params.multi_items() if request.scope["query_string"] else []
    asked = [
        request.method,
        request.scope["path"].removeprefix("/v1"),
        sorted(query),
        # None without a body.
        request.scope["state"].get("json"),
    ]
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


OnceDep = Annotated[Once, Depends(_once, scope="function")]
