"""How many polls a second one API process answers with 304, the key checked, beside a bare GET.

A real Postgres, and two real servers one after the other on the same machine, each one process of
uvicorn with uvloop and httptools: the service, and a bare FastAPI application whose one endpoint
reads one row by its key with psycopg's pool and returns it as JSON, with no key to check. Clients
in another process keep connections open and poll 1,000 jobs in turn. The service is measured
answering from memory, then reading the database each time (a plain GET); rounds alternate and the
median of the ratios is printed.

    python benchmarks/polling.py [--clients 32] [--seconds 4] [--rounds 3] [--jobs 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from servers import running, serve_bare

from octrain.local.servers import LocalServers
from octrain_api.migrate import migrate
from octrain_api.settings import DatabaseSettings

REPOSITORY = Path(__file__).parents[1]

_JOBS = """
INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, started_at)
SELECT 'job_' || n, 'o', '{"team": "a"}', '', 0,
       jsonb_build_object('limits', '{"max_restarts": 3}'::jsonb, 'model', repeat('m', 1000)),
       'running', 'cpu:1:amp', now()
FROM generate_series(1, %(jobs)s) AS n
"""


def main() -> None:
    arguments = _arguments()
    if arguments.bare:
        _serve_bare()
        return
    if arguments.load:
        print(json.dumps(asyncio.run(_load(arguments))))
        return
    settings = {"max_connections": "100"}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServers(Path(folder), settings=settings) as servers,
    ):
        url = servers.create_database("polling")
        migrate(DatabaseSettings(url=url))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_JOBS, {"jobs": arguments.jobs})
            connection.execute("ANALYZE")
        environment = _environment(url, servers.redis_url, folder)
        make_key = [sys.executable, "-m", "octrain_api", "create-key", "--name", "b"]
        made = subprocess.run(
            [*make_key, "--owner", "o", "--scopes", "jobs:read"],
            env=environment,
            capture_output=True,
            check=True,
        )
        key = json.loads(made.stdout)["key"]
        _measure(arguments, environment, key)


def _measure(arguments: argparse.Namespace, environment: dict[str, str], key: str) -> None:
    ratios: dict[str, list[float]] = {"unchanged": [], "read": []}
    rates: dict[str, list[float]] = {"bare": [], "unchanged": [], "read": []}
    service = [sys.executable, "-m", "octrain_api", "serve", "--port", "0"]
    for _ in range(arguments.rounds):
        with running([sys.executable, __file__, "--bare"], environment) as address:
            bare = _loaded(arguments, address, "bare", key)
        rates["bare"].append(bare)
        with running(service, environment) as address:
            for kind in ("unchanged", "read"):
                rate = _loaded(arguments, address, kind, key)
                rates[kind].append(rate)
                ratios[kind].append(rate / bare)
    names = {
        "bare": "bare FastAPI, one row read",
        "unchanged": "304, key checked",
        "read": "200 with a key, a whole job read",
    }
    for kind, values in rates.items():
        line = f"{names[kind]:36} {statistics.median(values):8.0f} /s"
        if kind in ratios:
            line += f"   ratio {statistics.median(ratios[kind]):.2f}"
        print(line)


def _loaded(arguments: argparse.Namespace, address: str, kind: str, key: str) -> float:
    """Requests a second that clients in a process of their own get answered."""
    command = [sys.executable, __file__, "--load", f"{address} {kind} {key}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("clients", "seconds", "jobs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: float = json.loads(done.stdout)["rate"]
    return found


async def _load(arguments: argparse.Namespace) -> dict[str, float]:
    address, kind, key = arguments.load.split()
    host, _, port = address.partition(":")
    wanted = b"304" if kind == "unchanged" else b"200"
    ends = [0.0]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, n: int) -> bytes:
        path = f"/rows/job_{n}" if kind == "bare" else f"/v1/jobs/job_{n}"
        tag = f"If-None-Match: {tags[n]}\r\n" if kind == "unchanged" and n in tags else ""
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{tag}\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        if b"content-length: " in lower:
            length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        return head

    tags: dict[int, str] = {}
    reader, writer = await asyncio.open_connection(host, int(port))
    if kind == "unchanged":
        for n in range(1, arguments.jobs + 1):
            head = await ask(reader, writer, n)
            assert b" 200 " in head, head
            tags[n] = head.decode().lower().split("etag: ")[1].split("\r\n")[0]

    async def client(first: int) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        count, n = 0, first
        while time.monotonic() < ends[0]:
            head = await ask(reader, writer, n % arguments.jobs + 1)
            assert head[9:12] == wanted, head
            count += 1
            n += 1
        writer.close()
        return count

    # Warmed up first, for as long as a quarter of the measurement.
    ends[0] = time.monotonic() + arguments.seconds / 4
    await asyncio.gather(*(client(i * 7) for i in range(arguments.clients)))
    began = time.monotonic()
    ends[0] = began + arguments.seconds
    counts = await asyncio.gather(*(client(i * 7) for i in range(arguments.clients)))
    return {"rate": sum(counts) / (time.monotonic() - began)}


def _serve_bare() -> None:
    from fastapi import FastAPI
    from psycopg.rows import dict_row
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, min_size=10, max_size=10)

    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        await pool.open(wait=True)
        yield
        await pool.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/rows/{job_id}")
    async def row(job_id: str) -> dict[str, str | int | None]:
        async with pool.connection() as connection:
            cursor = connection.cursor(row_factory=dict_row)
            await cursor.execute(
                "SELECT id, owner, status, step, version FROM jobs WHERE id = %s", (job_id,)
            )
            found = await cursor.fetchone()
        assert found is not None
        return found

    serve_bare(app)


def _environment(url: str, redis_url: str, folder: str) -> dict[str, str]:
    paths = [str(REPOSITORY), str(REPOSITORY / "api")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DATABASE_URL": url,
        "OCTRAIN_RATE_LIMIT_READ": "0",  # it asks faster than any client may
        "REDIS_URL": redis_url,
        "OCTRAIN_ARTIFACT_URL": Path(folder).as_uri(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
