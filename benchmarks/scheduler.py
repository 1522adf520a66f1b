"""How fast the scheduler commits placements, and how long one tick of it takes.

A real Postgres with fsync on, 1,000 nodes (half of 8 GPUs, half of 16 CPU slots) and 10,000 queued
jobs of mixed needs, engines and priorities. Ticks run until every job has been placed; when the
nodes are full, some attempts end between two ticks. "Less its waits" is a tick without the time in
which other work had the processors. A placement is an attempt with its fencing
token, its outbox message, its event and the job's new state, committed. Then ticks over full nodes
with a full queue: the state of a busy service.

The peer is the plain way in the same database: one transaction for each placement, written by hand
(lock the next job, insert the attempt and the message, update the job, insert the event, commit).

    python benchmarks/scheduler.py [--jobs 10000] [--nodes 1000] [--batch 50]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from octrain.local.servers import LocalServers
from octrain_api.collection import spare_what_stays
from octrain_api.controller.scheduler import Scheduler
from octrain_api.database import Database
from octrain_api.migrate import migrate
from octrain_api.settings import ControllerSettings, DatabaseSettings, SchedulerSettings

_NODES = """
INSERT INTO nodes (id, name, owner, boot_id, hostname, version, device_kinds, cpu_slots, gpus,
                   engines, roots, private_roots, last_heartbeat_at)
SELECT 'node_' || n, 'node-' || n, 'o', 'b', 'h', '1',
       CASE WHEN n %% 2 = 0 THEN '{cuda}'::text[] ELSE '{cpu}' END,
       CASE WHEN n %% 2 = 0 THEN 0 ELSE 16 END,
       CASE WHEN n %% 2 = 0 THEN (
           SELECT jsonb_agg(jsonb_build_object('index', i, 'name', 'H200',
                                               'memory_bytes', 150754820096))
           FROM generate_series(0, 7) AS i
       ) ELSE '[]' END,
       '{"te": {"ok": true}, "torchao": {"ok": true}, "emulated": {"ok": true}}', '{}', false,
       now() + interval '1 day'
FROM generate_series(1, %(nodes)s) AS n
"""
_JOBS = """
INSERT INTO jobs (id, owner, name, labels, notes, priority, spec, status, need, total_steps,
                  created_at)
SELECT 'job_' || n, 'o', 'job ' || n, '{"team": "a"}', '', n %% 3,
       jsonb_build_object(
           'resources', jsonb_build_object('device', kind, 'gpus', gpus),
           'recipe', jsonb_build_object('engine', engine),
           'limits', '{"lease_ttl_seconds": 900, "stall_timeout_seconds": 1800}'::jsonb,
           'model', jsonb_build_object('source', 'huggingface', 'id', repeat('m', 1000))),
       'queued', kind || ':' || gpus || ':' || engine, 1000,
       now() - make_interval(secs => %(jobs)s - n)
FROM (
    SELECT n, CASE WHEN n %% 10 < 6 THEN 'cpu' ELSE 'cuda' END AS kind,
           CASE WHEN n %% 10 < 6 THEN 1 ELSE (ARRAY[1, 1, 1, 2, 2, 4, 8])[1 + n / 10 %% 7] END
               AS gpus,
           CASE WHEN n %% 10 < 6 THEN 'emulated' ELSE (ARRAY['te', 'torchao'])[1 + n %% 2] END
               AS engine
    FROM generate_series(1, %(jobs)s) AS n
) AS made
"""
_END_SOME = """
WITH ended AS (
    UPDATE attempts SET status = 'ended', ended_at = now(), outcome = 'succeeded'
    WHERE id IN (SELECT id FROM attempts WHERE status <> 'ended' ORDER BY id LIMIT %(count)s)
    RETURNING id, job_id
), gone AS (DELETE FROM outbox USING ended WHERE attempt_id = ended.id)
UPDATE jobs SET status = 'succeeded', ended_at = now() FROM ended WHERE jobs.id = ended.job_id
"""
_EMPTY = "TRUNCATE jobs, outbox, queue_groups CASCADE"


def main() -> None:
    arguments = _arguments()
    # As the controller does at its start.
    spare_what_stays()
    with tempfile.TemporaryDirectory() as folder, LocalServers(Path(folder)) as servers:
        settings = DatabaseSettings(url=servers.postgres_url)
        migrate(settings)
        with psycopg.connect(servers.postgres_url, autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit"):
                row = connection.execute(f"SHOW {setting}").fetchone()
                assert row == ("on",), f"{setting} is {row}"
            connection.execute(_NODES, {"nodes": arguments.nodes})
            connection.execute(_JOBS, {"jobs": arguments.jobs})
            connection.execute("ANALYZE")
            ours = asyncio.run(_ours(settings, connection, arguments))
            connection.execute(_EMPTY)
            connection.execute(_JOBS, {"jobs": arguments.jobs})
            connection.execute("ANALYZE")
            peer = _one_by_one(connection, arguments.peer)
    print(f"one transaction each    {peer:8.0f} placements/s")
    print(f"ratio                   {ours / peer:8.1f}")


async def _ours(
    settings: DatabaseSettings, connection: psycopg.Connection[Any], arguments: argparse.Namespace
) -> float:
    database = Database(settings)
    scheduler = Scheduler(database, ControllerSettings(), SchedulerSettings(batch=arguments.batch))
    filling: list[float] = []
    waits = _Waits(connection)
    waited: list[float] = []
    placed = 0
    began = time.perf_counter()
    # As the controller does before it acts.
    await scheduler.prepare()
    prepared = time.perf_counter() - began
    while placed < arguments.jobs:
        before = waits.seconds()
        began = time.perf_counter()
        count, more = await scheduler.tick()
        filling.append(time.perf_counter() - began)
        waited.append(waits.seconds() - before)
        placed += count
        if not more:
            connection.execute(_END_SOME, {"count": 500})
    rate = placed / sum(filling)
    print(f"queued jobs             {arguments.jobs:8d}   nodes {arguments.nodes}")
    print(f"placements              {placed:8d}   in {len(filling)} ticks, {sum(filling):.1f} s")
    print(f"placements committed    {rate:8.0f} /s")
    print(f"getting ready           {1000 * prepared:8.1f} ms, before it leads: it reads all nodes")
    print(f"the first tick          {1000 * filling[0]:8.1f} ms")
    _say("a tick that places", filling)
    _say("  less its waits", [t - w for t, w in zip(filling, waited, strict=True)])
    busy = await _busy(scheduler, connection, arguments)
    _say("a tick over full nodes", busy)
    await database.close()
    return rate


async def _busy(
    scheduler: Scheduler, connection: psycopg.Connection[Any], arguments: argparse.Namespace
) -> list[float]:
    """Ticks while all nodes are full and as many jobs wait as at the start."""
    connection.execute(_EMPTY)
    connection.execute(_JOBS, {"jobs": 2 * arguments.jobs})
    connection.execute("ANALYZE")
    await scheduler.run()
    row = connection.execute("SELECT count(*) FROM jobs WHERE status = 'queued'").fetchone()
    print(f"queued over full nodes  {row[0] if row else 0:8d}")
    times = []
    for _ in range(50):
        began = time.perf_counter()
        await scheduler.tick()
        times.append(time.perf_counter() - began)
    return times


class _Waits:
    """For how long the scheduler and its connections were ready and had no processor: what other
    work on this machine costs them. Linux counts it for each thread, in nanoseconds.
    Source: https://docs.kernel.org/scheduler/sched-stats.html
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def seconds(self) -> float:
        rows = self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' "
            "AND pid <> pg_backend_pid()"
        )
        paths = [Path(f"/proc/{pid}/schedstat") for (pid,) in rows]
        paths += Path("/proc/self/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[1]) for path in paths) / 1e9


def _one_by_one(connection: psycopg.Connection[Any], count: int) -> float:
    """Placements per second when each has a transaction of its own; to any node, unchecked."""
    began = time.perf_counter()
    for number in range(count):
        with connection.transaction():
            row = connection.execute(
                "SELECT id FROM jobs WHERE status = 'queued' ORDER BY priority DESC, created_at, "
                "id LIMIT 1 FOR UPDATE SKIP LOCKED"
            ).fetchone()
            assert row is not None
            attempt = f"att_{number}"
            connection.execute(
                "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
                "gpu_indices, lease_seconds) VALUES (%s, %s, 1, 'node_1', 'placed', "
                "nextval('fencing_tokens'), 'cpu', '{}', 900)",
                [attempt, row[0]],
            )
            connection.execute(
                "INSERT INTO outbox (attempt_id, queue, task_id, payload) "
                "VALUES (%s, 'node.node_1', %s, '{}')",
                [attempt, f"{row[0]}:1"],
            )
            connection.execute(
                "UPDATE jobs SET status = 'starting', attempt = 1, sequence = 1 WHERE id = %s",
                [row[0]],
            )
            connection.execute(
                "INSERT INTO events (job_id, seq, kind, actor, message, attempt, data) "
                "VALUES (%s, 1, 'status', 'scheduler', 'Placed.', 1, '{}')",
                [row[0]],
            )
    return count / (time.perf_counter() - began)


def _say(what: str, times: list[float]) -> None:
    milliseconds = sorted(1000 * t for t in times)
    p99 = milliseconds[min(int(len(milliseconds) * 0.99), len(milliseconds) - 1)]
    print(
        f"{what:<23} {statistics.median(milliseconds):8.1f} ms median, {p99:.1f} p99, "
        f"{milliseconds[-1]:.1f} longest"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=SchedulerSettings().batch)
    parser.add_argument("--peer", type=int, default=500, help="placements of the plain way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
