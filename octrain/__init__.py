"""What users import and type: the client, the `octrain` command and the local stack.

``octrain.Client``, its errors and the names beside it are loaded at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octrain.client import (
        AsyncClient,
        AsyncJob,
        Client,
        Conflict,
        DatasetInvalid,
        DownloadDamaged,
        IdempotencyKeyInFlight,
        IdempotencyKeyReused,
        InvalidRequest,
        Job,
        JobFailed,
        MissingExtra,
        NoCapableNode,
        NotAllowed,
        NotAuthenticated,
        NotFound,
        OctrainError,
        QuotaExceeded,
        RateLimited,
        ScopeMissing,
        SecretShownOnce,
        ServerError,
        ServerUnreachable,
        SpecInvalid,
        TooLarge,
        WaitTimeout,
        WrongStatus,
    )

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Conflict",
    "DatasetInvalid",
    "DownloadDamaged",
    "IdempotencyKeyInFlight",
    "IdempotencyKeyReused",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "MissingExtra",
    "NoCapableNode",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "OctrainError",
    "QuotaExceeded",
    "RateLimited",
    "ScopeMissing",
    "SecretShownOnce",
    "ServerError",
    "ServerUnreachable",
    "SpecInvalid",
    "TooLarge",
    "WaitTimeout",
    "WrongStatus",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import octrain.client

        return getattr(octrain.client, name)
    raise AttributeError(f"module 'octrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
