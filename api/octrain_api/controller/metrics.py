"""The controller's care for metrics: batches are compacted, and what is too old is forgotten."""

import time

from octrain_api.database import Database
from octrain_api.metrics.compaction import Compactor
from octrain_api.metrics.retention import sweep
from octrain_api.settings import MetricSettings


class MetricKeeper:
    """One tick compacts; now and then one sweeps, or makes free what compacting left."""

    def __init__(self, database: Database, settings: MetricSettings) -> None:
        self._database = database
        self._settings = settings
        self._compactor = Compactor(database)
        self._swept_at: float | None = None

    async def tick(self) -> bool:
        """Whether there is more to compact at once."""
        now = time.monotonic()
        if self._swept_at is None or now - self._swept_at >= self._settings.sweep_interval:
            await sweep(self._database, self._settings)
            self._swept_at = now
        more = await self._compactor.tick()
        await self._compactor.vacuum_if_due()
        return more
