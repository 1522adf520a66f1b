"""Which limits there are, and how they are told: the `RateLimit` headers.

Source: IETF draft-ietf-httpapi-ratelimit-headers, "RateLimit header fields for HTTP".
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """`quota` requests in `window` seconds, refilled evenly; all of them may come at once."""

    name: str
    quota: int
    window: int

    @property
    def rate(self) -> float:
        """Requests that are refilled in a second."""
        return self.quota / self.window

    @property
    def portion(self) -> int:
        """How many requests a process takes from the shared bucket at once: 2 percent of it."""
        return max(1, self.quota // 50)


@dataclass(frozen=True)
class Decision:
    """Whether a request may pass, and what is left after it."""

    policy: Policy
    allowed: bool
    remaining: int

    @property
    def reset(self) -> int:
        """Seconds in which the whole quota is there again."""
        return math.ceil((self.policy.quota - self.remaining) / self.policy.rate)

    @property
    def retry_after(self) -> int:
        """Seconds in which there is one again, when there is none."""
        return max(1, math.ceil(1 / self.policy.rate))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`RateLimit-Policy` and `RateLimit`."""
        policy = f'"{self.policy.name}";q={self.policy.quota};w={self.policy.window}'
        left = f'"{self.policy.name}";r={self.remaining};t={self.reset}'
        return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", left.encode())]
