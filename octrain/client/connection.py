"""Where the server is and which key opens it: arguments, then the environment, then this
machine's local stack.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from octrain.client.errors import OctrainError, ServerUnreachable
from octrain.local.state import StackState, default_data_dir


@dataclass(frozen=True)
class Connection:
    """The server's URL and an API key; ``origin`` says where the URL was found."""

    url: str
    key: str = field(repr=False)
    origin: str


def find_connection(
    url: str | None = None, key: str | None = None, *, data_dir: Path | None = None
) -> Connection:
    """Settle the URL and the key. Errors: OctrainError that says how to give them.

    The local stack's key is never sent to another server's URL.
    """
    state = _local_state(data_dir or default_data_dir())
    given = url or os.environ.get("OCTRAIN_API_URL")
    origin = "the argument" if url else "OCTRAIN_API_URL" if given else "the local stack"
    # Every path of ours begins with /v1 by itself.
    settled = (given or state.api.url).rstrip("/").removesuffix("/v1")
    if not settled:
        raise ServerUnreachable(
            "No server is known. Start one here with `octrain up`, name one with OCTRAIN_API_URL "
            "and OCTRAIN_API_KEY, or, where it was started with --data-dir, that folder with "
            "OCTRAIN_DATA_DIR."
        )
    if not settled.startswith(("http://", "https://")):
        raise OctrainError(f"The server's URL must begin with http:// or https://, not {settled!r}")
    try:
        httpx.URL(settled)
    except httpx.InvalidURL as error:
        raise OctrainError(f"The server's URL {settled!r} is not valid: {error}") from None
    settled_key = key or os.environ.get("OCTRAIN_API_KEY") or ""
    if not settled_key and settled == state.api.url:
        settled_key = state.api.key
    if not (settled_key.isascii() and settled_key.isprintable()) or " " in settled_key:
        raise OctrainError("The API key holds characters that no key has: was it copied whole?")
    return Connection(settled, settled_key, origin)


def trusted(ca_file: str | Path | None = None) -> ssl.SSLContext | bool:
    """Whom to trust over TLS: beside the usual authorities those of ``ca_file`` (PEM), else of
    OCTRAIN_CA_FILE. Errors: OctrainError for a file that holds none."""
    file = ca_file or os.environ.get("OCTRAIN_CA_FILE")
    if not file:
        return True
    context = httpx.create_ssl_context()
    try:
        context.load_verify_locations(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise OctrainError(
            f"{file} (OCTRAIN_CA_FILE) holds no certificates that can be read: {error}"
        ) from None
    return context


def _local_state(data_dir: Path) -> StackState:
    try:
        return StackState.load(data_dir)
    except (OSError, ValueError):
        return StackState()
