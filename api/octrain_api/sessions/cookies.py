"""The cookie of a session, and the token that forgery of requests cannot know.

The cookie is out of reach of scripts (`HttpOnly`) and of other sites (`SameSite=Strict`). A page of
ours proves that it is one by a header that repeats what `GET /session` told it: the CSRF token is
an HMAC under the session's own token, so it needs no place in the database, dies with the session
and gives nothing away of it.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response

CSRF_HEADER = "X-Octrain-CSRF"
COOKIE = "octrain_session"
# Browsers take this one over TLS only, and from no other host of the domain.
# Source: RFC 6265bis 4.1.3.2, the prefix "__Host-".
SECURE_COOKIE = f"__Host-{COOKIE}"


@dataclass(frozen=True)
class OpenSession:
    """The session of this request, by the token in its cookie."""

    token: str = field(repr=False)

    @property
    def csrf_token(self) -> str:
        """What unsafe requests of this session send in `X-Octrain-CSRF`."""
        return csrf_token(self.token)


def new_session_token() -> str:
    """A token of 256 random bits."""
    return f"octs_{secrets.token_urlsafe(32)}"


def csrf_token(token: str) -> str:
    """The CSRF token of the session with this token."""
    return hmac.new(token.encode(), b"octrain csrf", hashlib.sha256).hexdigest()


def read_cookie(headers: Headers) -> str | None:
    """The session token that the request brings."""
    cookies = cookie_parser("; ".join(headers.getlist("cookie")))
    return cookies.get(SECURE_COOKIE) or cookies.get(COOKIE) or None


def set_cookie(response: Response, token: str, *, secure: bool, seconds: int) -> None:
    """Let the browser keep the session for so long."""
    response.set_cookie(
        SECURE_COOKIE if secure else COOKIE,
        token,
        max_age=seconds,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def clear_cookies(response: Response) -> None:
    """Let the browser forget the session, whichever way it came."""
    for name, secure in ((SECURE_COOKIE, True), (COOKIE, False)):
        response.delete_cookie(name, path="/", secure=secure, httponly=True, samesite="strict")
