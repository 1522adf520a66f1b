"""Signing in and out with a browser."""

from fastapi import APIRouter, Request, Response

from octrain_api.audit.recording import note_target
from octrain_api.auth import AnyKey
from octrain_api.dependencies import ContextDep, SessionDep
from octrain_api.sessions.cookies import OpenSession, clear_cookies, set_cookie
from octrain_api.sessions.schemas import SessionObject, SessionRequest
from octrain_api.sessions.service import SessionService

router = APIRouter(prefix="/session", tags=["sessions"])


@router.post("", status_code=201)
async def create_session(
    body: SessionRequest,
    request: Request,
    response: Response,
    session: SessionDep,
    context: ContextDep,
) -> SessionObject:
    """Sign in with an API key: sets the cookie of a session, which may what the key may.

    Requests with the cookie need no `Authorization`. Those that are not GET or HEAD must repeat
    `csrf_token` in the header `X-Octrain-CSRF`.
    """
    settings = context.settings.sessions
    token, opened, holder = await SessionService(session, settings).open(body.key)
    note_target(request, opened.id)
    # Whose doing this is, for the audit log: the request came without a holder.
    request.state.principal = holder
    # A proxy in front may speak TLS for us; the browser's own word tells it.
    secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
    left = opened.expires_at - opened.created_at
    set_cookie(response, token, secure=secure, seconds=max(1, int(left.total_seconds())))
    response.headers["Cache-Control"] = "no-store"
    return opened


@router.get("")
async def get_session(
    request: Request,
    response: Response,
    session: SessionDep,
    context: ContextDep,
    principal: AnyKey,
) -> SessionObject:
    """Who is signed in by this request's cookie, and the CSRF token. 404 for a request that
    brought a key instead."""
    response.headers["Cache-Control"] = "no-store"
    return await SessionService(session, context.settings.sessions).get(_current(request))


@router.delete("", status_code=204)
async def delete_session(
    request: Request, session: SessionDep, context: ContextDep, principal: AnyKey
) -> Response:
    """Sign out: the session ends, and the browser forgets its cookie."""
    ended = await SessionService(session, context.settings.sessions).end(_current(request))
    note_target(request, ended)
    response = Response(status_code=204)
    clear_cookies(response)
    return response


def _current(request: Request) -> OpenSession | None:
    found = getattr(request.state, "session", None)
    return found if isinstance(found, OpenSession) else None
