"""The exit statuses of `octrain`, for scripts: the one table, which docs/cli.md shows."""

from __future__ import annotations

from enum import IntEnum

from octrain.client import (
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    OctrainError,
    QuotaExceeded,
    RateLimited,
    ServerUnreachable,
    TooLarge,
    WaitTimeout,
)


class Exit(IntEnum):
    """What a command ended with."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    AUTH = 4
    UNREACHABLE = 5
    JOB_NOT_SUCCEEDED = 6
    CONFLICT = 7
    LIMITED = 8
    TIMEOUT = 9
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "success",
    Exit.FAILED: "anything else: the server made an error, a download was damaged, the local "
    "stack failed",
    Exit.USAGE: "wrong usage, or the server found the spec or a value not valid",
    Exit.NOT_FOUND: "no such job, artifact, recipe, key, ...",
    Exit.AUTH: "no key, a key that is not valid, or one that may not do this",
    Exit.UNREACHABLE: "no server is known, or none answers",
    Exit.JOB_NOT_SUCCEEDED: "a job that was waited for failed or was cancelled",
    Exit.CONFLICT: "the present state does not allow it, such as pausing a job that has ended",
    Exit.LIMITED: "a quota or the rate limit is used up",
    Exit.TIMEOUT: "the job had not ended within --timeout; it goes on",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
}

_BY_ERROR: tuple[tuple[type[OctrainError], Exit], ...] = (
    (ServerUnreachable, Exit.UNREACHABLE),
    (WaitTimeout, Exit.TIMEOUT),
    (QuotaExceeded, Exit.LIMITED),
    (RateLimited, Exit.LIMITED),
    (NotAuthenticated, Exit.AUTH),
    (NotAllowed, Exit.AUTH),
    (NotFound, Exit.NOT_FOUND),
    (Conflict, Exit.CONFLICT),
    (InvalidRequest, Exit.USAGE),
    (TooLarge, Exit.USAGE),
)


def exit_of(error: OctrainError) -> Exit:
    """The status of an error."""
    for kind, status in _BY_ERROR:
        if isinstance(error, kind):
            return status
    # A data set that its check refused has the status of an invalid request.
    return Exit.USAGE if error.status == 422 else Exit.FAILED


def members_of(error: OctrainError) -> dict[str, object]:
    """What an error tells beside its detail, as ``--json`` prints it, without what is not known."""
    members: dict[str, object] = {
        "type": error.type,
        "title": error.title,
        "status": error.status,
        "errors": [problem.model_dump(mode="json") for problem in error.problems],
        "request_id": error.request_id,
    }
    return {key: value for key, value in members.items() if value}
