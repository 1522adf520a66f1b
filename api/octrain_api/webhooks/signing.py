"""Signatures of webhooks as Standard Webhooks 1.0.0 defines them: HMAC-SHA256, `v1`.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    """`whsec_` and 256 random bits in base64."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(
    keys: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """The three headers; one signature for each of the secrets `keys`, in their order.

    `timestamp` is of this attempt, in Unix seconds; `message_id` stays the same over all of them.
    """
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = [_sign(key, content) for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def _sign(secret: str, content: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    return base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
