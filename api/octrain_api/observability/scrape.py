"""The page for Prometheus: what this process counted, and what the database says of the service.

The second part is the same from every API process. It is read at most once in five seconds, by
queries that cost as much as there are live jobs, nodes and owners of the present, not of the past.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.controller.figures import BUCKETS, PLACEMENT_SECONDS
from octrain_api.controller.placement import Need
from octrain_api.database import Database
from octrain_api.observability.measures import Measures

_CACHE_SECONDS = 5.0
_JOBS = text(
    "SELECT status, count(*) FROM jobs "
    "WHERE status NOT IN ('succeeded', 'failed', 'cancelled') GROUP BY status"
)
_QUEUE = text(
    "SELECT need, count(*), CAST(extract(epoch FROM now() - min(created_at)) AS float8) "
    "FROM jobs WHERE status = 'queued' GROUP BY need"
)
_NODES = text(
    """
    SELECT CASE WHEN last_heartbeat_at <= now() - make_interval(secs => :ttl) THEN 'silent'
                WHEN quarantined_since IS NOT NULL THEN 'set_aside'
                WHEN wanted <> 'run' THEN 'draining' ELSE 'live' END AS state, count(*)
    FROM nodes GROUP BY 1
    """
)
_COUNTERS = text("SELECT name, label, value FROM service_counters")
_SILENCE = text(
    "SELECT CAST(extract(epoch FROM now() - alive_at) AS float8) "
    "FROM service_clocks WHERE name = 'controller'"
)
_OUTBOX = text("SELECT count(*) FROM outbox")


class Scrape:
    """Makes the page."""

    def __init__(
        self,
        database: Database,
        measures: Measures,
        *,
        heartbeat_ttl: int,
        silence_allowed: int,
        streams: Callable[[], int],
    ) -> None:
        self._database = database
        self._measures = measures
        self._heartbeat_ttl = heartbeat_ttl
        self._silence_allowed = silence_allowed
        self._streams = streams
        self._asking = asyncio.Lock()
        self._known: bytes = b""
        self._known_at = float("-inf")

    async def text(self) -> bytes:
        """The page in Prometheus' text format."""
        own = CollectorRegistry()
        own.register(_Given(self._of_this_process()))
        async with self._asking:
            if time.monotonic() - self._known_at > _CACHE_SECONDS:
                self._known = await self._of_the_service()
                self._known_at = time.monotonic()
        return generate_latest(self._measures.registry) + generate_latest(own) + self._known

    def _of_this_process(self) -> list[Metric]:
        return [
            GaugeMetricFamily(
                "octrain_streams", "Live streams that this process serves.", self._streams()
            ),
            GaugeMetricFamily(
                "octrain_database_connections_used",
                "Connections of this process's pool that are in use.",
                self._database.connections_used,
            ),
            GaugeMetricFamily(
                "octrain_process_start_time_seconds",
                "When this process started, in Unix seconds.",
                self._measures.started_at,
            ),
        ]

    async def _of_the_service(self) -> bytes:
        registry = CollectorRegistry()
        up = GaugeMetricFamily("octrain_database_up", "Whether the database answered.")
        try:
            families = await self._read()
            up.add_metric([], 1)
        except (SQLAlchemyError, OSError):
            families = []
            up.add_metric([], 0)
        registry.register(_Given([up, *families]))
        return generate_latest(registry)

    async def _read(self) -> list[Metric]:
        async with self._database.session() as session:
            jobs = (await session.execute(_JOBS)).all()
            queue = (await session.execute(_QUEUE)).all()
            nodes = (await session.execute(_NODES, {"ttl": self._heartbeat_ttl})).all()
            counters = (await session.execute(_COUNTERS)).all()
            silence = await session.scalar(_SILENCE)
            messages = await session.scalar(_OUTBOX)
        leads = silence is not None and silence <= self._silence_allowed
        return [
            _gauge("octrain_jobs", "Jobs that have not ended, by status.", ["status"], jobs),
            *_queue_families(queue),
            _gauge("octrain_nodes", "Registered nodes, by state.", ["state"], nodes),
            _gauge("octrain_outbox_messages", "Placed, not yet claimed.", [], [(messages,)]),
            _gauge(
                "octrain_controller_leading", "Whether a controller leads.", [], [(int(leads),)]
            ),
            _gauge(
                "octrain_controller_silence_seconds",
                "Since the leading controller was last heard; -1: never.",
                [],
                [(silence if silence is not None else -1,)],
            ),
            *_placement_families({(row[0], row[1]): row[2] for row in counters}),
        ]


class _Given(Collector):
    """Families that were read already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, what: str, labels: list[str], rows: Sequence[Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=labels)
    for row in rows:
        family.add_metric([str(value) for value in row[: len(labels)]], float(row[len(labels)]))
    return family


def _ranks(count: int) -> str:
    """The number of ranks as one of a few labels."""
    for most in (1, 2, 4, 8, 16):
        if count <= most:
            return str(most)
    return "more"


def _queue_families(rows: Sequence[Any]) -> list[Metric]:
    """Depth and age of the queue by what its jobs need: of a pinned one without its node."""
    depth: Counter[tuple[str, str, str]] = Counter()
    for text_of_need, count, _ in rows:
        try:
            need = Need.parse(text_of_need)
        except ValueError:
            continue  # of a damaged row, whose job the scheduler ends
        depth[need.device, need.engine, _ranks(need.ranks)] += count
    oldest = max((age for _, _, age in rows), default=0.0)
    return [
        _gauge(
            "octrain_queue_depth",
            "Queued jobs, by device, engine and ranks (rounded up).",
            ["device", "engine", "ranks"],
            [(*labels, count) for labels, count in sorted(depth.items())],
        ),
        _gauge("octrain_queue_oldest_seconds", "Age of the oldest queued job.", [], [(oldest,)]),
    ]


def _placement_families(counters: dict[tuple[str, str], float]) -> list[Metric]:
    histogram = HistogramMetricFamily(
        "octrain_placement_seconds", "From the submission of a job to its first placement."
    )
    total, buckets = 0.0, []
    for label in [*map(str, BUCKETS), "+Inf"]:
        total += counters.get((PLACEMENT_SECONDS, label), 0.0)
        buckets.append((label, total))
    histogram.add_metric([], buckets, counters.get((PLACEMENT_SECONDS, "sum"), 0.0))
    placements = CounterMetricFamily("octrain_placements", "Attempts that were placed on nodes.")
    placements.add_metric([], counters.get(("placements", ""), 0.0))
    return [histogram, placements]
