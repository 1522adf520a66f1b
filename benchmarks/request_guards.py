"""What limits cost a read: `GET /v1/jobs/{id}` with rate limits on and off, in one run.

    python benchmarks/request_guards.py

The application is called directly, without sockets, so that what is compared is the application:
its answer to a poll that finds nothing new (304), and to a whole read. Prints the rate of each and
the ratio; rounds of both alternate, and the median counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from octrain.local.servers import LocalServers
from octrain_api.app import create_app
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from octrain_api.keys.schemas import KeyRequest
from octrain_api.keys.service import KeyService
from octrain_api.migrate import migrate
from octrain_api.settings import (
    BrokerSettings,
    DatabaseSettings,
    HttpSettings,
    RateLimitSettings,
    Settings,
)

ROUNDS = 7
REQUESTS = 600
AT_ONCE = 4
# So many that the benchmark is never refused; the portions are then as large as the requests need.
LIMITS = RateLimitSettings(read=30_000, window=1)


async def call(app: Any, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Any:
    """One request; status, headers, body."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    answer: dict[str, Any] = {"body": b""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer["status"] = message["status"]
            answer["headers"] = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            answer["body"] += message.get("body", b"")

    await app(scope, receive, send)
    return answer


async def rate(app: Any, path: str, headers: dict[str, str], status: int) -> float:
    """Requests a second, four at a time."""

    async def some() -> None:
        for _ in range(REQUESTS // AT_ONCE):
            answer = await call(app, "GET", path, headers)
            assert answer["status"] == status, answer

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return REQUESTS / (time.perf_counter() - began)


async def measure(settings: Settings) -> None:
    """Compare."""

    off = settings.model_copy(
        update={"rate_limits": RateLimitSettings(read=0, write=0, worker=0, address=0)}
    )
    apps = {"on": create_app(settings), "off": create_app(off)}
    lives = [app.router.lifespan_context(app) for app in apps.values()]
    for life in lives:
        await life.__aenter__()
    context = apps["on"].state.context
    async with context.database.transaction() as session:
        request = KeyRequest(name="b", owner="b", scopes=["jobs:read", "jobs:write"])
        key = (await KeyService(session).create(request)).key
    headers = {"Authorization": f"Bearer {key}"}
    body = json.dumps(EXAMPLE_SPEC).encode()
    sent = headers | {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    made = await call(apps["on"], "POST", "/v1/jobs", sent, body)
    path = made["headers"]["location"]
    await call(apps["on"], "POST", f"{path}/cancel", headers)
    tag = (await call(apps["on"], "GET", path, headers))["headers"]["etag"]
    for name, more, status in (
        ("304", {"If-None-Match": tag}, 304),
        ("whole read", {}, 200),
    ):
        found: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(ROUNDS):
            for which, app in apps.items():
                found[which].append(await rate(app, path, headers | more, status))
        on, without = (statistics.median(found[which]) for which in ("on", "off"))
        print(
            f"{name:<11} limits on {on:8.0f} /s   off {without:8.0f} /s   ratio {on / without:.2f}"
        )
    for life in lives:
        await life.__aexit__(None, None, None)


def main() -> None:
    """Start a database and measure."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, LocalServers(Path(folder)) as servers:
        database = DatabaseSettings(url=servers.postgres_url)
        migrate(database)
        settings = Settings(
            database=database,
            broker=BrokerSettings(url=servers.redis_url),
            http=HttpSettings(alive_interval=3600),
            rate_limits=LIMITS,
        )
        asyncio.run(measure(settings))


if __name__ == "__main__":
    main()
