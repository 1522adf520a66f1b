"""What this process counts, for Prometheus: labels are routes, methods and classes, never ids."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class Measures:
    """Counters of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.started_at = time.time()
        self._requests = Counter(
            "octrain_http_requests",
            "Requests answered, by route template and class of status; `none` was never answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "octrain_http_request_seconds",
            "Time to the end of the answer, of all but streams and long polls.",
            ["method", "route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._open = Gauge(
            "octrain_http_requests_open",
            "Requests being served now, live streams among them.",
            registry=self.registry,
        )
        self.telemetry_records = Counter(
            "octrain_telemetry_records",
            "Telemetry records taken from supervisors.",
            registry=self.registry,
        )
        self.telemetry_batches = Counter(
            "octrain_telemetry_batches",
            "Telemetry batches taken from supervisors.",
            registry=self.registry,
        )
        self.refused_by_rate = Counter(
            "octrain_rate_limited",
            "Requests refused by a rate limit, by the limit's class.",
            ["limit"],
            registry=self.registry,
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Around one request."""
        self._open.inc()
        try:
            yield
        finally:
            self._open.dec()

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Note an answered request; `status` 0 is one that was never answered."""
        method = method if method in _METHODS else "other"
        status_class = f"{status // 100}xx" if status else "none"
        self._requests.labels(method, route, status_class).inc()
        if not route.endswith("/stream"):
            self._seconds.labels(method, route).observe(seconds)
