"""The key of this node: given by its operator, or got once for an enrolment token and kept here.

``OCTRAIN_NODE_KEY`` goes before everything. Else ``OCTRAIN_NODE_TOKEN``, a one-time token, is
exchanged for a key, which is kept in ``node.key`` in the data folder (0600). The token may stay in
the environment: it is used again only when it is another one than that of the kept key.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import replace

from pydantic import SecretStr

from fp8core.stored_json import read_object
from octrain_worker.api_client import ApiClient, ApiUnavailable, retrying
from octrain_worker.attempt_folder import write_private
from octrain_worker.settings import WorkerSettings

__all__ = ["with_node_key"]

logger = logging.getLogger(__name__)


def with_node_key(settings: WorkerSettings, stop: threading.Event | None = None) -> WorkerSettings:
    """The settings with the node's key in them, enrolling it first where that is needed.

    Waits for an API that is away until ``stop`` is set. Raises ``ApiRefused`` when the token is
    not taken.
    """
    if settings.api.node_key.get_secret_value():
        return settings
    path = settings.node.data_dir / "node.key"
    token = settings.api.node_token.get_secret_value()
    digest = hashlib.sha256(token.encode()).hexdigest() if token else None
    kept = read_object(path)
    if path.exists() and not (kept and _is_key(kept.get("key"))):
        logger.error(
            "%s is damaged: give the node a new token (OCTRAIN_NODE_TOKEN), or its key", path
        )
        kept = None
    if kept is not None and (digest is None or kept.get("token_sha256") == digest):
        return _with(settings, kept["key"])
    if digest is None:
        return settings
    client = ApiClient(settings.api.api_url, "", ca_file=settings.api.ca_file)

    def failed(error: Exception, _pause: float) -> None:
        if isinstance(error, ApiUnavailable):
            at = settings.api.api_url
            logger.warning("the node cannot enrol yet at %s: %s", at, error)

    try:
        key = retrying(
            lambda: client.enrol(token, settings.node.name),
            stop=stop or threading.Event(),
            on_failure=failed,
        )
    finally:
        client.close()
    if key is None:
        return settings
    write_private(path, {"key": key, "token_sha256": digest, "node": settings.node.name})
    logger.info("node %s has enrolled; its key is in %s", settings.node.name, path)
    return _with(settings, key)


def _is_key(value: object) -> bool:
    """Whether a header can carry it."""
    return isinstance(value, str) and value.isascii() and value.isprintable() and value != ""


def _with(settings: WorkerSettings, key: str) -> WorkerSettings:
    return replace(settings, api=settings.api.model_copy(update={"node_key": SecretStr(key)}))
