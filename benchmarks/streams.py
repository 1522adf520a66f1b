"""How late 1,000 subscribers of one job hear of an event, and what a stream costs in memory.

A real Postgres with fsync on, one API process as `octrain_api serve` starts it, and 1,000 HTTP
clients over loopback sockets in a process of their own. Events are written by a third process, one
a second, in the service's own way: under the job's lock, numbered, committed. The delay of a
delivery is from just before that transaction to the arrival of the bytes at a client.

The peer is as little as can deliver at all: an asyncio server with raw sockets, no HTTP, that
listens to the same notifications and writes the same number of bytes to each of its 1,000 clients.
The ratio of the delays says what the service adds.

    python benchmarks/streams.py [--clients 1000] [--events 30] [--interval 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from octrain.local.servers import LocalServers
from octrain_api.database import Database
from octrain_api.events.repository import EventRepository
from octrain_api.jobs.repository import JobRepository
from octrain_api.listener import JOB_CHANNEL
from octrain_api.migrate import migrate
from octrain_api.settings import DatabaseSettings

REPOSITORY = Path(__file__).parents[1]
_SENT = re.compile(rb'"sent":(\d+\.\d+)')
_PEER_BYTES = 400
_JOB = """
INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, started_at)
VALUES ('job_1', 'o', '{}', '', 0, '{}', 'running', 'cpu:1:amp', now())
"""


def main() -> None:
    arguments = _arguments()
    if arguments.peer:
        asyncio.run(_serve_peer())
        return
    if arguments.listen:
        asyncio.run(_listen(arguments))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServers(Path(folder), settings={"max_connections": "100"}) as servers,
    ):
        url = servers.create_database("streams")
        migrate(DatabaseSettings(url=url))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_JOB)
        environment = _environment(url, servers.redis_url, folder)
        make_key = [sys.executable, "-m", "octrain_api", "create-key", "--name", "b"]
        made = subprocess.run(
            [*make_key, "--owner", "o", "--scopes", "jobs:read"],
            env=environment,
            capture_output=True,
            check=True,
        )
        key = json.loads(made.stdout)["key"]
        service = [sys.executable, "-m", "octrain_api", "serve", "--port", "0"]
        peer = [sys.executable, __file__, "--peer"]
        ours = _measure(arguments, service, environment, url, key)
        base = _measure(arguments, peer, environment, url, key)
    print(f"{arguments.clients} subscribers, {arguments.events} events, each delivered to all")
    for name, found in (("service", ours), ("raw sockets", base)):
        print(
            f"{name:12} p50 {found['p50'] * 1000:6.1f} ms   p99 {found['p99'] * 1000:6.1f} ms   "
            f"last {found['max'] * 1000:6.1f} ms   {found['memory'] / 1024:5.1f} KiB a stream   "
            f"{found['cpu'] / arguments.events * 1000:5.1f} ms CPU an event"
        )
    print(f"p99 to the peer's: ratio {ours['p99'] / base['p99']:.2f}")


def _measure(
    arguments: argparse.Namespace,
    command: list[str],
    environment: dict[str, str],
    url: str,
    key: str,
) -> dict[str, float]:
    with _started(command, environment, "running on http://") as (server, line):
        address = line.split("http://")[1].split()[0]
        before = _resident(server.pid)
        listen = [sys.executable, __file__, "--listen", f"{address} {key}"]
        listen += [f"--clients={arguments.clients}", f"--events={arguments.events}"]
        with _started(listen, environment, "connected") as (clients, _):
            memory = (_resident(server.pid) - before) / arguments.clients
            cpu = _cpu_seconds(server.pid)
            asyncio.run(_write_events(url, arguments.events, arguments.interval))
            out, _ = clients.communicate("done\n", timeout=60)
            cpu = _cpu_seconds(server.pid) - cpu
    delays = sorted(json.loads(out))
    expected = arguments.clients * arguments.events
    if len(delays) != expected:
        raise RuntimeError(f"{len(delays)} deliveries in place of {expected}")
    return {
        "p50": delays[len(delays) // 2],
        "p99": delays[int(len(delays) * 0.99)],
        "max": delays[-1],
        "memory": memory,
        "cpu": cpu,
    }


async def _write_events(url: str, count: int, interval: float) -> None:
    database = Database(DatabaseSettings(url=url))
    begin = time.monotonic() + 1
    for number in range(count):
        await asyncio.sleep(begin + number * interval - time.monotonic())
        sent = time.time()
        async with database.transaction() as session:
            job = await JobRepository(session).lock("job_1")
            assert job is not None
            await EventRepository(session).append(
                job, kind="note", actor="benchmark", message="", data={"sent": sent}
            )
    await database.close()


async def _listen(arguments: argparse.Namespace) -> None:
    """Opens the connections, tells so, and after the last event prints the delays."""
    _raise_limit()
    address, key = arguments.listen.split()
    host, _, port = address.partition(":")
    arrived: list[tuple[float, bytes]] = []
    begun = 0

    class Client(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            request = (
                f"GET /v1/jobs/job_1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}"
            )
            transport.write(f"{request}\r\n\r\n".encode())

        def data_received(self, data: bytes) -> None:
            nonlocal begun
            if b'"sent"' in data:
                arrived.append((time.time(), data))
            elif b"retry" in data:
                begun += 1

    loop = asyncio.get_running_loop()
    for first in range(0, arguments.clients, 50):
        count = min(50, arguments.clients - first)
        await asyncio.gather(
            *(loop.create_connection(Client, host, int(port)) for _ in range(count))
        )
    while begun < arguments.clients:
        await asyncio.sleep(0.05)
    await asyncio.sleep(2)
    print("connected", file=sys.stderr, flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    give_up_at = time.monotonic() + 30
    while len(arrived) < arguments.clients * arguments.events and time.monotonic() < give_up_at:
        await asyncio.sleep(0.1)
    delays = [when - float(sent) for when, data in arrived for sent in _SENT.findall(data)]
    print(json.dumps(delays))


async def _serve_peer() -> None:
    _raise_limit()
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"retry\n")

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    connection = await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True)
    await connection.execute(f"LISTEN {JOB_CHANNEL}")
    print(f"running on http://127.0.0.1:{port}", file=sys.stderr, flush=True)
    newest = "SELECT data->>'sent' FROM events WHERE job_id = 'job_1' ORDER BY seq DESC LIMIT 1"
    reading = await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True)
    async for _ in connection.notifies():
        [sent] = await (await reading.execute(newest)).fetchone() or [0]
        data = f'"sent":{sent}'.ljust(_PEER_BYTES).encode()
        for writer in writers:
            writer.write(data)


@contextmanager
def _started(
    command: list[str], environment: dict[str, str], sign: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, once it has written the sign to its standard error, and that line."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_raise_limit,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if sign in line:
                yield process, line
                break
            print(line, end="", file=sys.stderr)
        else:
            raise RuntimeError(f"{command[-2:]} did not start")
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def _raise_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _resident(pid: int) -> int:
    """Bytes of a process in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment(url: str, redis_url: str, folder: str) -> dict[str, str]:
    paths = [str(REPOSITORY), str(REPOSITORY / "api")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DATABASE_URL": url,
        "REDIS_URL": redis_url,
        "OCTRAIN_ARTIFACT_URL": Path(folder).as_uri(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
