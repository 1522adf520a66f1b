"""Who is asking: bearer keys, scopes, owners."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from octrain_api.dependencies import SessionDep
from octrain_api.keys.repository import KeyRepository
from octrain_api.problems import Problem


class Scope(StrEnum):
    """What a key may do. `admin` may do what `jobs:read` and `jobs:write` may, for every owner."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    ADMIN = "admin"
    NODE = "node"


@dataclass(frozen=True)
class Principal:
    """The holder of the key of this request."""

    key_id: str
    owner: str
    scopes: frozenset[str]

    @property
    def is_admin(self) -> bool:
        """Whether this key sees every owner's jobs."""
        return Scope.ADMIN in self.scopes

    @property
    def visible_owner(self) -> str | None:
        """The owner whose jobs this key sees; None for all."""
        return None if self.is_admin else self.owner

    def may(self, scope: Scope) -> bool:
        """Whether the key grants `scope`."""
        if scope in self.scopes:
            return True
        return self.is_admin and scope in (Scope.JOBS_READ, Scope.JOBS_WRITE)


def new_key() -> str:
    """A key of 256 random bits."""
    return f"oct_{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """SHA-256 in hexadecimal: enough for a value of 256 random bits, which nobody can guess."""
    return hashlib.sha256(key.encode()).hexdigest()


_bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer oct_...`")
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="octrain"'}


async def _principal(
    request: Request,
    session: SessionDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Principal:
    if credentials is None:
        raise Problem(
            401,
            "not-authenticated",
            "Not authenticated",
            "Send an API key: `Authorization: Bearer oct_...`.",
            headers=_CHALLENGE,
        )
    key = await KeyRepository(session).find_active(hash_key(credentials.credentials))
    if key is None:
        raise Problem(
            401,
            "not-authenticated",
            "Not authenticated",
            "This API key is unknown or revoked.",
            headers=_CHALLENGE,
        )
    return Principal(key_id=key.id, owner=key.owner, scopes=frozenset(key.scopes))


def require(scope: Scope) -> Callable[[Principal], Awaitable[Principal]]:
    """A dependency that lets pass only keys with `scope`."""

    async def check(principal: Annotated[Principal, Depends(_principal)]) -> Principal:
        if not principal.may(scope):
            raise Problem(
                403,
                "scope-missing",
                "Not allowed",
                f"This key lacks the scope {scope.value!r}.",
                required_scope=scope.value,
            )
        return principal

    return check


Reader = Annotated[Principal, Depends(require(Scope.JOBS_READ))]
Writer = Annotated[Principal, Depends(require(Scope.JOBS_WRITE))]
Admin = Annotated[Principal, Depends(require(Scope.ADMIN))]
NodeWorker = Annotated[Principal, Depends(require(Scope.NODE))]
