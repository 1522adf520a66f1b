"""Requests per key within their limits, at the cost of one short transaction for fifty of them.

The bucket of a key lies in the database. A process takes a portion of 2 percent from it at a time
and spends that in memory, so a read pays nothing most of the time. What a process holds is taken
already, so all of them together never give more than the bucket had; a portion that is not spent
within the window is forgotten. The bound: a quota, and 2 percent of it for each API process.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from octrain_api.database import Database
from octrain_api.rate_limits.policy import Decision, Policy
from octrain_api.rate_limits.repository import take

_MOST_BUCKETS = 50_000


@dataclass
class _Held:
    """What this process holds of one bucket."""

    left: int = 0
    # Of the shared bucket, when a portion was last taken.
    shared: int = 0
    taken_at: float = 0.0
    # Until then the shared bucket is known to be empty.
    empty_until: float = 0.0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLimiter:
    """Limits by key, shared through the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: OrderedDict[str, _Held] = OrderedDict()

    async def take(self, key: str, policy: Policy) -> Decision:
        """Count one request of this key."""
        held = self._of(f"{policy.name}:{key}")
        if not self._spend(held, policy):
            async with held.asking:
                # Whoever waited finds what the first one brought.
                if not self._spend(held, policy):
                    if time.monotonic() < held.empty_until:
                        return Decision(policy, False, 0)
                    await self._ask(held, key, policy)
                    if not self._spend(held, policy):
                        held.empty_until = time.monotonic() + 1 / policy.rate
                        return Decision(policy, False, 0)
        return Decision(policy, True, held.left + held.shared)

    def _of(self, name: str) -> _Held:
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held()
            while len(self._held) > _MOST_BUCKETS:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(name)
        return held

    @staticmethod
    def _spend(held: _Held, policy: Policy) -> bool:
        if held.left <= 0 or time.monotonic() - held.taken_at > policy.window:
            return False
        held.left -= 1
        return True

    async def _ask(self, held: _Held, key: str, policy: Policy) -> None:
        async with self._database.transaction() as session:
            held.left, held.shared = await take(session, key, policy)
        held.taken_at = time.monotonic()


class AddressLimiter:
    """What addresses do without a key, in this process alone: failed authentications, sign-ins."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, address: str) -> Decision | None:
        """The refusal, if this address has come too often; else None."""
        if self._policy is None:
            return None
        left = self._filled(address, self._policy)
        return Decision(self._policy, False, 0) if left < 1 else None

    def count(self, address: str) -> None:
        """Count one of this address."""
        if self._policy is None:
            return
        left = self._filled(address, self._policy)
        self._buckets[address] = (max(left - 1, 0.0), time.monotonic())
        self._buckets.move_to_end(address)
        while len(self._buckets) > _MOST_BUCKETS:
            self._buckets.popitem(last=False)

    def _filled(self, address: str, policy: Policy) -> float:
        left, at = self._buckets.get(address, (float(policy.quota), 0.0))
        return min(float(policy.quota), left + policy.rate * (time.monotonic() - at))
