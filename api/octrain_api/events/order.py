"""The order of the events of all jobs, in which a reader misses none that commits late.

A number drawn from a sequence is drawn before the commit: a reader could pass it while it cannot be
seen yet. So the order is that of the transactions that wrote the events, and a reader reads only up
to the oldest transaction that is still open: what is below it can change no more.
"""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(\d{1,19})(?::(\w{1,64}):(\d{1,19}))?", re.ASCII)


@dataclass(frozen=True, order=True)
class EventPosition:
    """After this event of this transaction; without one, before all that the transaction wrote."""

    transaction: int
    job_id: str = ""
    seq: int = 0

    def __str__(self) -> str:
        if not self.job_id:
            return str(self.transaction)
        return f"{self.transaction}:{self.job_id}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> "EventPosition | None":
        """The position in a message's `id`; None for anything else."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        numbers = int(found[1]), int(found[3] or 0)
        if max(numbers) >= 2**63:
            return None
        return cls(numbers[0], found[2] or "", numbers[1])
