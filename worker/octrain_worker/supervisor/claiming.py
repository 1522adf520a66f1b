"""How a supervisor gets its attempt, or learns that it is not to have it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from octrain_worker.api_client import ApiClient, ApiRefused, Claim, StaleAttempt, retrying
from octrain_worker.clock import boot_time
from octrain_worker.supervisor.wakeup import Wakeup

__all__ = ["Claimed", "claim_attempt"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claimed:
    """The API's answer and the boot time before it was asked for. Without a claim ``disowned``
    says whether the API gave the attempt to somebody else, or ended it, and ``unsure`` whether a
    request stayed without an answer: it may have claimed the attempt."""

    claim: Claim | None
    sent_at: float = 0.0
    disowned: bool = False
    unsure: bool = False


def claim_attempt(
    client: ApiClient,
    attempt_id: str,
    *,
    node_id: str,
    nonce: str,
    patience: float,
    wakeup: Wakeup,
    traceparent: str | None = None,
) -> Claimed:
    """Claims with ``nonce``, for ``patience`` seconds while the API is away.

    A successor claims again with its predecessor's nonce, and so gets the token that the
    predecessor may not have lived to write down.
    """
    give_up_at = boot_time() + patience
    stop = threading.Event()
    unsure = False

    def ask() -> Claimed:
        sent_at = boot_time()
        claim = client.claim(attempt_id, node_id=node_id, supervisor=nonce, traceparent=traceparent)
        return Claimed(claim, sent_at)

    def failed(error: Exception, _pause: float) -> None:
        nonlocal unsure
        unsure = True
        logger.warning("claim: %s", error)
        if boot_time() > give_up_at or wakeup.terminations:
            stop.set()

    try:
        answer = retrying(ask, stop=stop, on_failure=failed, longest_delay=2.0)
    except StaleAttempt as error:
        logger.info("attempt %s is not ours: %s", attempt_id, error)
        return Claimed(None, disowned=True)
    except ApiRefused as error:
        logger.error("claim refused: %s", error)
        return Claimed(None, unsure=unsure)
    return answer or Claimed(None, unsure=unsure)
