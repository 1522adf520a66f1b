"""Requests that another site makes a browser send: refused, whatever route they are for.

Two walls, besides the cookie's `SameSite`: the request's origin must be ours, and an unsafe one
must carry the session's CSRF token.
"""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from octrain_api.problems import Problem
from octrain_api.sessions.cookies import CSRF_HEADER, OpenSession

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_SIGN_IN = frozenset({"/session", "/v1/session"})
_PORTS = {"http": 80, "https": 443}


def signs_in(scope: Scope) -> bool:
    """Whether this asks for a new session: no cookie counts for that, only the key in its body."""
    return scope["method"] == "POST" and scope["path"] in _SIGN_IN


def check_origin(headers: Headers, allowed: frozenset[str]) -> None:
    """Refuse what a page of another origin sends.

    `allowed` are origins that count as ours beside the request's own host: the public ones of a
    proxy that does not hand the host on. What names no origin at all comes from no browser.
    """
    origin = headers.get("origin")
    if origin is None:
        if headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none"):
            return
        raise _refused("It comes from a page of another site.")
    if origin.lower() in allowed or _is_host(origin, headers.get("host", "")):
        return
    raise _refused(
        f"It comes from a page of {origin[:200]!r}. Where a proxy gives this service another host "
        "name than browsers see, its operator names the public one in OCTRAIN_SESSIONS_ORIGINS."
    )


def check_unsafe(scope: Scope, headers: Headers, session: OpenSession, own: frozenset[str]) -> None:
    """Refuse an unsafe request of this session that does not prove to come from a page of ours."""
    if scope["method"] in SAFE:
        return
    check_origin(headers, own)
    given = headers.get(CSRF_HEADER)
    if given is None:
        raise _refused(f"The header {CSRF_HEADER} is missing; GET /session tells its value.")
    if not hmac.compare_digest(given.encode(), session.csrf_token.encode()):
        raise _refused(f"The header {CSRF_HEADER} is of another session; read GET /session anew.")


def _refused(why: str) -> Problem:
    text = f"The request is not taken as the user's own. {why}"
    return Problem(403, "csrf-refused", "Not allowed", text)


def _is_host(origin: str, host: str) -> bool:
    """Whether the origin's host and port are those of the `Host` header.

    The scheme is not compared: a proxy may speak TLS for us.
    """
    try:
        parts = urlsplit(origin)
        own = urlsplit(f"{parts.scheme}://{host}")
        default = _PORTS.get(parts.scheme)
        if default is None or not parts.hostname:
            return False
        return (parts.hostname, parts.port or default) == (own.hostname, own.port or default)
    except ValueError:
        return False
