"""Who is asking: bearer keys, scopes, owners."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from octrain_api.dependencies import ContextDep
from octrain_api.keys.principal import Principal, Scope, hash_key, new_key
from octrain_api.problems import Problem
from octrain_api.sessions.cookies import read_cookie

__all__ = [
    "Admin",
    "AnyKey",
    "NodeWorker",
    "Principal",
    "Reader",
    "Scope",
    "Writer",
    "hash_key",
    "new_key",
    "optional_principal",
    "require",
]

_bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer oct_...`")
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="octrain"'}


async def _principal(
    request: Request,
    context: ContextDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Principal:
    # Admission has looked already; who holds a key may have changed in the meantime only.
    principal = getattr(request.state, "principal", None)
    if principal is None and credentials is None:
        gone = read_cookie(request.headers) is not None
        raise Problem(
            401,
            "not-authenticated",
            "Not authenticated",
            "This session has ended: sign in again."
            if gone
            else "Send an API key: `Authorization: Bearer oct_...`.",
            headers=_CHALLENGE,
        )
    if principal is None and credentials is not None:
        principal = await context.principals.of(credentials.credentials)
    if principal is None:
        raise Problem(
            401,
            "not-authenticated",
            "Not authenticated",
            "This API key is unknown, expired or revoked.",
            headers=_CHALLENGE,
        )
    assert isinstance(principal, Principal)
    return principal


async def optional_principal(request: Request) -> Principal | None:
    """Who asks, or None without a valid key: for routes that may be open."""
    principal = getattr(request.state, "principal", None)
    return principal if isinstance(principal, Principal) else None


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


AnyKey = Annotated[Principal, Depends(_principal)]
Reader = Annotated[Principal, Depends(require(Scope.JOBS_READ))]
Writer = Annotated[Principal, Depends(require(Scope.JOBS_WRITE))]
Admin = Annotated[Principal, Depends(require(Scope.ADMIN))]
NodeWorker = Annotated[Principal, Depends(require(Scope.NODE))]
