"""Which fault comes when: drawn from a seed before anything starts, so a run can be repeated.

A fault's victim is not known in advance, for it depends on what runs; ``pick`` (0 to 1) chooses
among the candidates of the moment. The kinds come from decks that are shuffled, so that each comes
about as often as it stands in the deck, however the seed falls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DECK", "LONG", "Fault", "UserAction", "draw_faults", "draw_users"]

# From the beginning of one fault to that of the next, on average.
_SECONDS_BETWEEN = 4.7
# The faults that keep a supervisor from its lease, which is of LEASE_SECONDS, for longer than it.
LONG = frozenset({"freeze supervisor beyond its lease", "cut network beyond the lease"})
# In what ways a network is not there.
_CUTS = ("refuse", "reset", "blackhole", "unanswered")

# Each kind, how often it is in the deck, and for how many seconds it lasts.
DECK: dict[str, tuple[int, tuple[float, float]]] = {
    "kill api": (2, (0.3, 6.0)),
    "kill both apis": (1, (0.5, 5.0)),
    "kill controller": (2, (0.3, 6.0)),
    "kill celery worker": (1, (0.5, 6.0)),
    "kill supervisor": (3, (0.0, 0.0)),
    "kill trainer": (3, (0.0, 0.0)),
    "kill one rank of two": (1, (0.0, 0.0)),
    "kill supervisor and trainer": (1, (0.0, 0.0)),
    "freeze supervisor": (1, (2.0, 12.0)),
    "freeze supervisor beyond its lease": (1, (45.0, 55.0)),
    "freeze celery worker": (1, (4.0, 20.0)),
    "restart postgres": (2, (0.2, 4.0)),
    "restart valkey": (1, (0.2, 4.0)),
    "valkey away while jobs are posted": (1, (4.0, 12.0)),
    "flush valkey": (2, (0.0, 0.0)),
    "cut network": (2, (2.0, 15.0)),
    "cut network beyond the lease": (1, (45.0, 55.0)),
    "deliver a message twice": (2, (0.0, 0.0)),
    "fill a node's disk": (1, (2.0, 8.0)),
    "tear the newest checkpoint": (1, (0.0, 0.0)),
}


@dataclass(frozen=True)
class Fault:
    """One fault: at which second, of what kind, for how long, and what chooses its victim."""

    at: float
    kind: str
    seconds: float
    pick: float
    detail: str = ""

    def choose(self, candidates: Sequence[Any]) -> Any:
        """The victim among those that there are."""
        return candidates[int(self.pick * len(candidates))]

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{detail}{lasting}"


@dataclass(frozen=True)
class UserAction:
    """What a user does to some job: at which second, what, and what chooses the job."""

    at: float
    kind: str
    pick: float
    seconds: float


def draw_faults(seed: int, duration: float) -> list[Fault]:
    """The faults of a run, by time. The last fifth of the time has none that outlasts it by far."""
    chooser = random.Random(f"faults {seed}")
    count = max(1, round(duration / _SECONDS_BETWEEN))
    kinds: list[str] = []
    while len(kinds) < count:
        deck = [kind for kind, (often, _) in DECK.items() for _ in range(often)]
        chooser.shuffle(deck)
        kinds += deck
    gap = duration / count
    faults = []
    for number, kind in enumerate(kinds[:count]):
        at = (number + chooser.uniform(0.1, 0.9)) * gap
        low, high = DECK[kind][1]
        seconds = round(chooser.uniform(low, high), 1) if high else 0.0
        detail = chooser.choice(_CUTS) if "network" in kind else ""
        faults.append(Fault(round(at, 1), kind, seconds, chooser.random(), detail))
    return faults


def draw_users(seed: int, duration: float, jobs: int) -> tuple[Sequence[float], list[UserAction]]:
    """When each job is posted, and what users do besides."""
    chooser = random.Random(f"users {seed}")
    posts = sorted(round(chooser.uniform(0, 0.75) * duration, 1) for _ in range(jobs))
    posts[: max(1, jobs // 8)] = [0.0] * max(1, jobs // 8)  # work from the beginning
    actions = []
    for kind, share in (("pause", 0.4), ("cancel", 0.15)):
        for _ in range(round(jobs * share)):
            at = round(chooser.uniform(0.03, 0.95) * duration, 1)
            seconds = round(chooser.uniform(1.0, 12.0), 1)
            actions.append(UserAction(at, kind, chooser.random(), seconds))
    return posts, sorted(actions, key=lambda action: action.at)
