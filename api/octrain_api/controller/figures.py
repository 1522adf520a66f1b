"""What the controller counts. It serves no HTTP, so the counters lie in the database, where the API
reads them for Prometheus; a controller that takes over goes on with them."""

import bisect
import time
from collections import Counter
from collections.abc import Iterable

from sqlalchemy.dialects.postgresql import insert

from octrain_api.database import Database
from octrain_api.models import ServiceCounter

PLACEMENT_SECONDS = "placement_seconds"
# Upper bounds; the counter of each holds what lies between it and the one before.
BUCKETS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86400.0)
_LABELS = (*map(str, BUCKETS), "+Inf")
_INTERVAL = 2.0


class Figures:
    """Counts in memory, and adds to the database every two seconds at most."""

    def __init__(self, interval: float = _INTERVAL) -> None:
        self._interval = interval
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0
        self._written_at = float("-inf")

    def placed(self, count: int, waited: Iterable[float]) -> None:
        """So many attempts were placed; those of a first attempt had waited so many seconds."""
        self._counts["placements", ""] += count
        for seconds in waited:
            label = _LABELS[bisect.bisect_left(BUCKETS, seconds)]
            self._counts[PLACEMENT_SECONDS, label] += 1
            self._seconds += seconds

    async def write(self, database: Database) -> None:
        """Add what was counted, if there is anything and it is time."""
        if not self._counts or time.monotonic() - self._written_at < self._interval:
            return
        values: dict[tuple[str, str], float] = dict(self._counts)
        if self._seconds:
            values[PLACEMENT_SECONDS, "sum"] = self._seconds
        rows = [
            {"name": name, "label": label, "value": value}
            for (name, label), value in sorted(values.items())
        ]
        statement = insert(ServiceCounter).values(rows)
        statement = statement.on_conflict_do_update(
            index_elements=[ServiceCounter.name, ServiceCounter.label],
            set_={"value": ServiceCounter.value + statement.excluded.value},
        )
        async with database.transaction() as session:
            await session.execute(statement)
        self._counts.clear()
        self._seconds = 0.0
        self._written_at = time.monotonic()
