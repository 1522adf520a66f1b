"""Whether this machine can serve the sinks that a spec names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from fp8core.errors import SpecRefused
from fp8core.spec.job import Telemetry

__all__ = ["check_sinks", "mlflow_server"]


def check_sinks(wanted: Telemetry) -> None:
    """Raises ``SpecRefused``, with the field, for a sink that cannot be served here."""
    if wanted.tensorboard:
        _needs("tensorboard", "/telemetry/tensorboard")
    if wanted.wandb is not None:
        _needs("wandb", "/telemetry/wandb")
    if wanted.mlflow is not None:
        mlflow_server(wanted.mlflow.tracking_uri, os.environ)


def mlflow_server(tracking_uri: str | None, environment: Mapping[str, str]) -> str:
    """The server to send to: the spec's, or this machine's. Raises ``SpecRefused``."""
    pointer = "/telemetry/mlflow/tracking_uri"
    ours = environment.get("MLFLOW_TRACKING_URI") or None
    chosen = tracking_uri or ours
    if chosen is None:
        raise SpecRefused(
            "names no server, and this machine has no MLFLOW_TRACKING_URI", pointer=pointer
        )
    if ours is not None and _origin(chosen) != _origin(ours):
        raise SpecRefused(
            f"this machine sends to {_shown(ours)} only (its MLFLOW_TRACKING_URI)",
            pointer=pointer,
        )
    if _origin(chosen)[0] not in ("http", "https"):
        raise SpecRefused("must be the address of a server, http or https", pointer=pointer)
    return chosen.rstrip("/")


def _needs(package: str, pointer: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SpecRefused(
            f"needs the package {package}, which is not installed on this machine: "
            f"pip install 'octrain[{package}]'",
            pointer=pointer,
        )


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _shown(address: str) -> str:
    """Without a password that may be in it."""
    scheme, host, port = _origin(address)
    return f"{scheme}://{host}:{port}"
