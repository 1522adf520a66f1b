"""How fast the API takes jobs, beside a bare insert and MLflow; and how fast it lists them.

A real Postgres with fsync on and real servers, one after the other on the same machine. Ours is one
process of `octrain_api serve`: each POST /jobs sends an API key, an Idempotency-Key and a spec of
its own name, and what it stores is the checked spec, its events, the key, the audit entry. The bare
one is a FastAPI application in one process of uvicorn (uvloop, httptools) whose one endpoint takes
the same JSON, with no key and no check, and inserts it into a table of three columns through
psycopg's pool. MLflow's is its tracking server with two workers on the same Postgres: runs/create
with a name and ten tags. Clients in another process keep connections open, send ready-made bodies
and wait for each answer. Rounds alternate; medians of the rounds are printed, ratios within each.

Then a page of 100 out of 100,000 jobs with their attempts, at places drawn anew each time.

    python benchmarks/api.py [--parts post page] [--clients 4] [--seconds 8] [--rounds 3]
                             [--jobs 100000] [--mlflow-python PATH]

`--mlflow-python` names a Python that has mlflow and psycopg2; without it MLflow is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from servers import running, serve_bare

from fp8core.spec import parse_spec
from octrain.local.servers import LocalServers
from octrain_api.jobs.schemas import EXAMPLE_SPEC
from octrain_api.migrate import migrate
from octrain_api.settings import DatabaseSettings

REPOSITORY = Path(__file__).parents[1]
PARTS = ("post", "page")
PAGES = 300
_STRIDE = 500  # jobs between two places that pages are read at

_NODE = """
INSERT INTO nodes (id, name, owner, boot_id, hostname, version, device_kinds, cpu_slots, gpus,
                   engines, roots, private_roots, last_heartbeat_at)
VALUES ('node_1', 'node-1', 'o', 'b', 'h', '1', '{cpu}', 16, '[]', '{"emulated": {"ok": true}}',
        '{}', false, now() + interval '1 day')
"""
# Of fifty jobs one waits, one runs, the others have ended; those that left the queue ran once.
_JOBS = """
INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, status, need, total_steps, step,
                  latest_metrics, version, sequence, attempt, created_at)
SELECT 'job_' || n, 'o', 'job ' || n, '{"team": "a"}', '', n %% 3, %(spec)s::json,
       CASE n %% 50 WHEN 0 THEN 'queued' WHEN 1 THEN 'running' WHEN 2 THEN 'failed'
                    ELSE 'succeeded' END,
       'auto:1:emulated', 1000, 1000, '{"train/loss": 2.5, "train/tokens_per_second": 1e4}',
       9, 9, CASE n %% 50 WHEN 0 THEN 0 ELSE 1 END,
       now() - make_interval(secs => %(jobs)s - n)
FROM generate_series(1, %(jobs)s) AS n
"""
_ATTEMPTS = """
INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, gpu_indices,
                      lease_seconds, step, claimed_at)
SELECT 'att_' || id, id, 1, 'node_1', CASE status WHEN 'running' THEN status ELSE 'ended' END,
       nextval('fencing_tokens'), 'cpu', '{}', 900, 1000, created_at
FROM jobs WHERE attempt = 1
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
        if "post" in arguments.parts:
            _post(servers, arguments, folder)
        if "page" in arguments.parts:
            _page(servers, arguments, folder)


def _post(servers: LocalServers, arguments: argparse.Namespace, folder: str) -> None:
    environment, key = _service_on(servers, "post", folder)
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("CREATE TABLE bare (id text PRIMARY KEY, spec jsonb, at timestamptz)")
    seen: dict[str, list[dict[str, float]]] = {"bare": [], "octrain": [], "mlflow": []}
    for _ in range(arguments.rounds):
        with running([sys.executable, __file__, "--bare"], environment) as address:
            seen["bare"].append(_loaded(arguments, address, "bare", key))
        with running(_SERVE, environment) as address:
            seen["octrain"].append(_loaded(arguments, address, "octrain", key))
        if arguments.mlflow_python:
            with _mlflow(servers, arguments.mlflow_python, folder) as address:
                seen["mlflow"].append(_loaded(arguments, address, "mlflow", key))
    names = {
        "bare": "bare FastAPI, one insert",
        "octrain": "POST /jobs",
        "mlflow": "MLflow runs/create",
    }
    print(f"{arguments.clients} clients           requests/s   p50 ms   p99 ms   rate, p99 to bare")
    for kind, rounds in seen.items():
        if not rounds:
            continue
        rate, p50, p99 = (statistics.median(r[f] for r in rounds) for f in ("rate", "p50", "p99"))
        line = f"{names[kind]:26} {rate:8.0f} {p50:8.2f} {p99:8.2f}"
        if kind != "bare":
            pairs = list(zip(rounds, seen["bare"], strict=True))
            rates = statistics.median(r["rate"] / b["rate"] for r, b in pairs)
            tails = statistics.median(r["p99"] / b["p99"] for r, b in pairs)
            line += f"   {rates:6.2f} {tails:6.2f}"
        print(line)


def _page(servers: LocalServers, arguments: argparse.Namespace, folder: str) -> None:
    environment, key = _service_on(servers, "page", folder)
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as connection:
        spec = json.dumps(parse_spec(EXAMPLE_SPEC).resolved())
        connection.execute(_JOBS, {"jobs": arguments.jobs, "spec": spec})
        connection.execute(_ATTEMPTS)
        connection.execute("VACUUM ANALYZE")
    with running(_SERVE, environment) as address:
        found = _loaded(arguments, address, "page", key)
    print(
        f"page of 100 of {arguments.jobs} jobs    p50 {found['p50']:.2f} ms, "
        f"p99 {found['p99']:.2f} ms, {found['bytes'] / 1024:.0f} KiB"
    )


_SERVE = [sys.executable, "-m", "octrain_api", "serve", "--port", "0"]


def _service_on(servers: LocalServers, name: str, folder: str) -> tuple[dict[str, str], str]:
    """The environment of a service on a new database with one node, and a user's key."""
    url = servers.create_database(name)
    migrate(DatabaseSettings(url=url))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_NODE)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
        "DATABASE_URL": url,
        "REDIS_URL": servers.redis_url,
        "OCTRAIN_ARTIFACT_URL": Path(folder).as_uri(),
        # Requests are counted, and none is refused.
        "OCTRAIN_RATE_LIMIT_WRITE": "600000",
    }
    make_key = [sys.executable, "-m", "octrain_api", "create-key", "--name", "b", "--owner", "o"]
    made = subprocess.run(
        [*make_key, "--scopes", "jobs:read,jobs:write"],
        env=environment,
        capture_output=True,
        check=True,
    )
    return environment, json.loads(made.stdout)["key"]


def _loaded(arguments: argparse.Namespace, address: str, kind: str, key: str) -> dict[str, float]:
    """What clients in a process of their own saw."""
    command = [sys.executable, __file__, "--load", f"{address} {kind} {key}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("clients", "seconds", "jobs")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


async def _load(arguments: argparse.Namespace) -> dict[str, float]:
    address, kind, key = arguments.load.split()
    host, _, port = address.partition(":")
    if kind == "page":
        return await _load_pages(host, int(port), key, arguments.jobs)
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(arguments.clients)]

    async def client(number: int, until: float) -> list[float]:
        reader, writer = connections[number]
        times, turn = [], 0
        while time.monotonic() < until:
            turn += 1
            request = _request(kind, key, f"{number}-{turn}-{until}")
            began = time.perf_counter()
            status, body = await _ask(reader, writer, request)
            times.append(time.perf_counter() - began)
            assert status in (200, 201), (status, body)
        return times

    async def all_clients(seconds: float) -> tuple[list[float], float]:
        began = time.monotonic()
        runs = [client(n, began + seconds) for n in range(arguments.clients)]
        times = [t for run in await asyncio.gather(*runs) for t in run]
        return times, time.monotonic() - began

    # Warmed up first, for as long as a quarter of the measurement.
    await all_clients(arguments.seconds / 4)
    times, took = await all_clients(arguments.seconds)
    return {"rate": len(times) / took, **_percentiles(times)}


async def _load_pages(host: str, port: int, key: str, jobs: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection(host, port)
    head = f"Host: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"

    async def page(query: str) -> tuple[dict[str, Any], int, float]:
        request = f"GET /v1/jobs?limit=100{query} HTTP/1.1\r\n{head}".encode()
        began = time.perf_counter()
        status, body = await _ask(reader, writer, request)
        took = time.perf_counter() - began
        assert status == 200, body
        return json.loads(body), len(body), took

    # Cursors of places all over the list, by walking through it in large steps.
    cursors, cursor = [""], ""
    while True:
        request = f"GET /v1/jobs?limit={_STRIDE}&fields=id{cursor} HTTP/1.1\r\n{head}".encode()
        _, body = await _ask(reader, writer, request)
        following = json.loads(body)["next_cursor"]
        if following is None:
            break
        cursor = f"&cursor={following}"
        cursors.append(cursor)
    assert len(cursors) == jobs // _STRIDE
    times, sizes, choice = [], [], random.Random(1)
    for turn in range(PAGES + 50):
        found, size, took = await page(choice.choice(cursors))
        assert len(found["items"]) == 100
        if turn >= 50:
            times.append(took)
            sizes.append(size)
    return {**_percentiles(times), "bytes": statistics.median(sizes)}


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"p{p}": ordered[int(len(ordered) * p / 100)] * 1000 for p in (50, 99)}


def _request(kind: str, key: str, name: str) -> bytes:
    """A POST of something new of this name."""
    if kind == "mlflow":
        tags = [{"key": f"tag{n}", "value": "v"} for n in range(10)]
        run = {"experiment_id": "0", "start_time": 0, "run_name": name, "tags": tags}
        body, path = json.dumps(run), "/api/2.0/mlflow/runs/create"
    else:
        body = json.dumps({**EXAMPLE_SPEC, "name": name})
        path = "/v1/jobs" if kind == "octrain" else "/rows"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    if kind == "octrain":
        head += f"Authorization: Bearer {key}\r\nIdempotency-Key: {name}\r\n"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status, body = int(head[9:12]), b""
    if b"content-length: " in head:
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return status, await reader.readexactly(length)
    while size := int(await reader.readuntil(b"\r\n"), 16):  # chunks
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return status, body


def _serve_bare() -> None:
    from fastapi import FastAPI
    from psycopg.types.json import Jsonb
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(os.environ["DATABASE_URL"], open=False, min_size=10, max_size=10)

    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        await pool.open(wait=True)
        yield
        await pool.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/rows", status_code=201)
    async def add(spec: dict[str, Any]) -> dict[str, str]:
        identifier = os.urandom(12).hex()
        async with pool.connection() as connection:
            await connection.execute(
                "INSERT INTO bare VALUES (%s, %s, now())", (identifier, Jsonb(spec))
            )
        return {"id": identifier}

    serve_bare(app)


@contextmanager
def _mlflow(servers: LocalServers, python: str, folder: str) -> Iterator[str]:
    database = servers.create_database("mlflow")
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(_free_port())]
    command += ["--workers", "2", "--default-artifact-root", Path(folder).as_uri()]
    command += ["--backend-store-uri", database.replace("postgresql:", "postgresql+psycopg2:", 1)]
    with (Path(folder) / "mlflow.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            address = f"127.0.0.1:{command[command.index('--port') + 1]}"
            _await_answer(address, process)
            yield address
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)


def _await_answer(address: str, process: subprocess.Popen[bytes]) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("MLflow did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--mlflow-python")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.jobs < _STRIDE or arguments.jobs % _STRIDE:
        parser.error(f"--jobs must be a multiple of {_STRIDE}")
    return arguments


if __name__ == "__main__":
    main()
