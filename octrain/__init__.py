"""What users import and type: the client, the `octrain` command and the local stack.

``octrain.Client`` and the names beside it are loaded at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octrain.client import AsyncClient, Client, Job, OctrainError, ServerUnreachable

__all__ = ["AsyncClient", "Client", "Job", "OctrainError", "ServerUnreachable"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import octrain.client

        return getattr(octrain.client, name)
    raise AttributeError(f"module 'octrain' has no attribute {name!r}")
