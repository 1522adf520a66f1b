"""What the client raises: for each type of problem (RFC 9457) that a server tells, an exception.

A type that this client does not know becomes the exception of its HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octrain.client.models import JobData, Problem


class OctrainError(Exception):
    """The server refused a request; the members are those of its problem document (RFC 9457).

    ``status`` is the HTTP status, ``type`` a stable name such as ``/problems/spec-invalid``,
    ``problems`` what is wrong where, ``members`` whatever else it says, ``retry_after`` the seconds
    after which to come again. 0, "" and None stand where no server answered.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        title: str = "",
        type: str = "",
        problems: Sequence[Problem] = (),
        members: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        lines = [detail, *(f"  {problem}" for problem in problems)]
        if len(problems) == 1 and problems[0].message in detail:
            # The server's summary of one thing is that thing; its place is said besides.
            lines = [detail if problems[0].pointer in detail else str(problems[0])]
        super().__init__("\n".join(lines))
        self.status = status
        self.title = title
        self.type = type
        self.detail = detail
        self.problems = tuple(problems)
        self.members = dict(members or {})
        self.retry_after = retry_after

    @property
    def pointers(self) -> tuple[str, ...]:
        """The JSON pointers into the request of all that is wrong."""
        return tuple(problem.pointer for problem in self.problems)

    @property
    def request_id(self) -> str | None:
        """The name of the request in the server's log, where the server told it."""
        told = self.members.get("request_id")
        return str(told) if told is not None else None


class ServerUnreachable(OctrainError):
    """No server answers at the URL, or it went away in the middle of an answer."""


class WaitTimeout(OctrainError):
    """The job had not ended when the time given to ``wait`` was over. It goes on."""


class JobFailed(OctrainError):
    """``wait(check=True)`` saw a job end other than ``succeeded``; ``job`` is its last state."""

    def __init__(self, job: JobData) -> None:
        super().__init__(f"Job {job.id} {job.status} ({job.reason}): {job.detail or 'no detail'}")
        self.job = job


class DownloadDamaged(OctrainError):
    """What arrived differs from what the server announced; nothing was kept."""


class MissingExtra(OctrainError, ImportError):
    """Something needs a library that the base installation does not bring."""


class NotAuthenticated(OctrainError):
    """401: no key was sent, or it is unknown, expired or revoked."""


class NotAllowed(OctrainError):
    """403: the key may not do this."""


class ScopeMissing(NotAllowed):
    """403: the key lacks the scope that the route needs."""


class QuotaExceeded(NotAllowed):
    """403: the owner has used all that the operator allows; ``members`` say of what."""


class NotFound(OctrainError):
    """404: there is no such thing, or this key may not see it."""


class Conflict(OctrainError):
    """409: the present state does not allow it."""


class IdempotencyKeyInFlight(Conflict):
    """409: a request with the same idempotency key is being worked on, even after the retries."""


class SecretShownOnce(Conflict):
    """409: an earlier try made the key or token; ``members["target"]`` says which. Its answer was
    lost, and with it the secret."""


class WrongStatus(Conflict):
    """409: the job's status does not allow the change."""


class TooLarge(OctrainError):
    """413: the body has more bytes than the server takes."""


class InvalidRequest(OctrainError):
    """422: values of the request are not valid; ``problems`` lists each with its place."""


class SpecInvalid(InvalidRequest):
    """422: the job's spec has errors; ``problems`` lists all of them."""


class NoCapableNode(InvalidRequest):
    """422: no registered node could ever run the job."""


class IdempotencyKeyReused(InvalidRequest):
    """422: the idempotency key was sent before with another body."""


class RateLimited(OctrainError):
    """429: more requests than the key's limit, even after waiting as long as the server said."""


class ServerError(OctrainError):
    """5xx: the server cannot answer now, or made an error."""


_BY_NAME: dict[str, type[OctrainError]] = {
    "not-authenticated": NotAuthenticated,
    "scope-missing": ScopeMissing,
    "quota-exceeded": QuotaExceeded,
    "not-found": NotFound,
    "wrong-status": WrongStatus,
    "request-invalid": InvalidRequest,
    "spec-invalid": SpecInvalid,
    "no-capable-node": NoCapableNode,
    "idempotency-key-in-flight": IdempotencyKeyInFlight,
    "idempotency-key-reused": IdempotencyKeyReused,
    "secret-shown-once": SecretShownOnce,
    "rate-limited": RateLimited,
}
_BY_STATUS: dict[int, type[OctrainError]] = {
    400: InvalidRequest,
    401: NotAuthenticated,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: InvalidRequest,
    429: RateLimited,
}


def exception_for(type_uri: str, status: int) -> type[OctrainError]:
    """The exception of a problem's type, else that of its status."""
    name = type_uri.rstrip("/").rsplit("/", 1)[-1]
    fallback = ServerError if status >= 500 else OctrainError
    return _BY_NAME.get(name) or _BY_STATUS.get(status, fallback)


def may_pass(error: OctrainError) -> bool:
    """Whether the same request can succeed later: nobody answered, or the server could not."""
    return isinstance(error, ServerUnreachable) or error.status == 429 or error.status >= 500
