"""How many points a second the service stores, how fast it reads them, what they take on disk.

A real Postgres with fsync on, one real API process, one controller that compacts meanwhile, all on
this machine. Each writer is a process of its own, for one job of 500 series with steps in order;
its bodies are built and sent by the supervisor's own code, inside the time that is measured. Half
of the series have values that float32 holds exactly, as a GPU computes them, half any float64.

Reads take turns with those of a bare FastAPI GET that reads one row and checks no key, in another
process: what the machine does besides slows both, and their ratio less.

The peer of what is stored is MLflow's tracking server on the same Postgres in the same run: as many
writers, each for one run, POST `runs/log-batch` with ready-made bodies, at the best of several
batch sizes (MLflow takes 1000 metrics a batch at most).

    python benchmarks/metrics.py [--parts store read delete] [--seconds 30] [--mlflow-python PATH]
    python benchmarks/metrics.py --parts sparse [--every 100]

`--mlflow-python` names a Python that has mlflow and psycopg2; without it, or without the part
`store`, there is no ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg
from metrics_load import SERIES, TOKEN, step_values, together, write_job
from metrics_mlflow import mlflow_rate
from metrics_service import bare_row, service, wait_until

from octrain.local.servers import LocalServers
from octrain_api.migrate import migrate
from octrain_api.settings import DatabaseSettings
from octrain_worker.api_client import ApiClient

PARTS = ("store", "read", "delete")
ALONE = "sparse"
"""What is measured with nothing else in the database."""
_TABLES = ("metric_layouts", "metric_series", "metric_batches", "metric_blocks", "metric_rollups")
# What an empty table with its indexes takes.
_GIVEN_BACK = 1 << 20
_AT_ONCE = 4000  # steps of the job that is read, in a body


def main() -> None:
    arguments = _arguments()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name, LocalServers(Path(name)) as servers:
        url = servers.postgres_url
        migrate(DatabaseSettings(url=url))
        with psycopg.connect(url, autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                assert connection.execute(f"SHOW {setting}").fetchone() == ("on",), setting
            with service(servers, Path(name)) as ours_at, bare_row(url) as bare:
                bench = Bench(connection, *ours_at, f"http://{bare}/rows")
                ours = 0.0
                if "store" in arguments.parts:
                    ours = bench.ingest(arguments.writers, arguments.seconds)
                    bench.disk()
                if ALONE in arguments.parts:
                    bench.sparse(arguments.every, arguments.looks)
                if "read" in arguments.parts:
                    bench.read(arguments.read_steps)
                    bench.latest(2000)
                if "delete" in arguments.parts:
                    bench.delete(arguments.delete_points)
        if arguments.mlflow_python is not None and ours:
            peer = mlflow_rate(servers, Path(name), arguments)
            print(f"ratio to MLflow         {ours / peer:10.1f}")


class Bench:
    """The measurements of our service."""

    def __init__(
        self, connection: psycopg.Connection[Any], url: str, user: str, node: str, bare: str
    ) -> None:
        self._connection = connection
        self._bare = bare
        self._url, self._node_key = url, node
        headers = {"Authorization": f"Bearer {user}"}
        self._http = httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=60)
        with httpx.Client(headers={"Authorization": f"Bearer {node}"}) as worker:
            answer = worker.post(
                f"{url}/v1/nodes/register",
                json={
                    "name": "bench",
                    "boot_id": "b",
                    "hostname": "h",
                    "version": "1",
                    "device_kinds": ["cpu"],
                    "cpu_slots": 0,
                    "gpus": [],
                    "engines": {},
                },
            )
            self._node_id = answer.raise_for_status().json()["node_id"]

    def job(self, name: str) -> str:
        """A running job with a claimed attempt, whose id is that of the job."""
        self._connection.execute(
            "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, need, attempt) "
            "VALUES (%s, 'o', '{}', '', 0, '{\"limits\": {}}', 'running', 'cpu:1:amp', 1)",
            [name],
        )
        self._connection.execute(
            "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
            "gpu_indices, lease_seconds, lease_expires_at, claimed_at, last_heartbeat_at, "
            "progress_at) VALUES (%s, %s, 1, %s, 'running', %s, 'cpu', '{}', 86400, "
            "now() + interval '1 day', now(), now() + interval '1 day', now())",
            [name, name, self._node_id, TOKEN],
        )
        return name

    def end(self, *names: str) -> None:
        """End the attempts, and wait until everything of them is compacted."""
        self._connection.execute(
            "UPDATE attempts SET status = 'ended', ended_at = now() WHERE job_id = ANY(%s)",
            [list(names)],
        )
        self._connection.execute(
            "UPDATE jobs SET status = 'succeeded', ended_at = now() WHERE id = ANY(%s)",
            [list(names)],
        )
        wait_until(lambda: self._count("SELECT count(*) FROM metric_batches") == 0)

    def _count(self, query: str, *values: str) -> int:
        row = self._connection.execute(query.encode(), values or None).fetchone()
        assert row is not None
        return int(row[0] or 0)

    def ingest(self, writers: int, seconds: float) -> float:
        """Points a second, sustained with the compaction at work."""
        names = [self.job(f"job_w{n}") for n in range(writers)]
        results = together(
            write_job, [(self._url, self._node_key, name, seconds) for name in names]
        )
        points = sum(result[0] for result in results)
        took = max(result[1] for result in results)
        left = self._size("metric_batches")
        open_batches = self._count("SELECT count(*) FROM metric_batches")
        began = time.monotonic()
        self.end(*names)
        stored = self._count("SELECT sum(points) FROM metric_blocks")
        assert stored == points, (stored, points)
        batches = sum(result[2] for result in results)
        print(f"writers                 {writers:10d}   of {SERIES} series each, {took:.1f} s")
        print(f"points                  {points:10d}   in {batches} batches, all found stored")
        print(f"points stored           {points / took:10.0f} /s")
        print(
            f"compaction left         {time.monotonic() - began:10.1f} s of work, "
            f"{open_batches} batches in {left / 2**20:.0f} MiB at the end"
        )
        return float(points / took)

    def disk(self) -> None:
        """Bytes a point with indexes and TOAST: as it is once all is compacted and the controller
        has given the batches' room back, then after a full vacuum.
        """
        points = self._count("SELECT sum(points) FROM metric_blocks")
        began = time.monotonic()
        wait_until(lambda: self._size("metric_batches") < _GIVEN_BACK + points // 8)
        row = self._connection.execute("SHOW autovacuum").fetchone()
        print(
            f"room given back         {time.monotonic() - began:10.1f} s after the last merge; "
            f"autovacuum is {row[0] if row else '?'}"
        )
        for when in ("compacted", "VACUUM FULL"):
            if when == "VACUUM FULL":
                self._connection.execute(f"VACUUM FULL {', '.join(_TABLES)}".encode())
            sizes = {table.removeprefix("metric_"): self._size(table) for table in _TABLES}
            parts = ", ".join(f"{name} {size / points:.2f}" for name, size in sizes.items())
            label = f"disk, {when}"
            print(f"{label:24s}{sum(sizes.values()) / points:10.2f} bytes a point: {parts}")

    def _size(self, table: str) -> int:
        return self._count("SELECT pg_total_relation_size(%s::regclass)", table)

    def read(self, steps: int) -> None:
        """One series of a million points as 1000 buckets."""
        name = self.job("job_read")
        client = ApiClient(self._url, self._node_key, timeout=60)
        rng = np.random.default_rng(1)
        names = [f"train/m{n}" for n in range(8)]
        # Now and then a row of 500 series: blocks are then cut as they are in such a job.
        wide = {f"fp8/layers.{n}/amax": 1.0 for n in range(SERIES - 8)}
        first = 1
        for start in range(0, steps, _AT_ONCE):
            values = rng.normal(size=(_AT_ONCE, 8)).tolist()
            records: list[dict[str, Any]] = [
                {
                    "type": "metrics",
                    "time": 1e9 + start + n,
                    "step": start + n,
                    "values": dict(zip(names, row, strict=True)),
                }
                for n, row in enumerate(values)
            ]
            records[0]["values"] |= wide
            client.telemetry(name, TOKEN, first, records)
            first += len(records)
        self.end(name)
        self._connection.execute("VACUUM ANALYZE metric_blocks, metric_rollups")
        blocks = self._count("SELECT count(*) FROM metric_blocks WHERE job_id = %s", name)
        path = f"/jobs/{name}/metrics?name=train/m3&form=buckets&max_points=1000"
        (series,) = self._http.get(path).json()["series"]
        assert sum(series["buckets"]["count"]) == steps
        print(f"one series              {steps:10d} points in {blocks} blocks, as", end=" ")
        print(f"{len(series['buckets']['count'])} buckets of {series['width']} steps")
        self._time("  (a read of the job)", f"/jobs/{name}", 200)
        self._time("  read as buckets", path, 200)
        self._time("  read as thinned points", path.replace("form=buckets&", ""), 100)
        self._time("  the last 1000 steps", f"{path}&from_step={steps - 1000}", 100)
        eight = f"/jobs/{name}/metrics?name=train/*&form=buckets&max_points=1000"
        self._time("  eight series as buckets", eight, 50)

    def sparse(self, every: int, looks: int) -> None:
        """What a job takes that looks at the health of 4,000 series now and then; alone in the
        database.
        """
        name = self.job("job_sparse")
        client = ApiClient(self._url, self._node_key, timeout=60)
        rng = np.random.default_rng(3)
        figures = [f"train/m{n}" for n in range(20)]
        health = [f"fp8/model.layers.{n // 8}.mlp.{n % 8}/amax" for n in range(8 * SERIES)]
        steps, first = looks * every, 1
        for start in range(0, steps, every):
            records: list[dict[str, Any]] = [
                {
                    "type": "metrics",
                    "time": 1e9 + step / 10,
                    "step": step,
                    "values": dict(zip(figures, row, strict=True)),
                }
                for step, row in enumerate(rng.normal(size=(every, 20)).tolist(), start=start)
            ]
            values = rng.normal(size=len(health))
            values[::2] = values[::2].astype(np.float32)
            # A record of its own, as the trainer writes it.
            row = dict(zip(health, values.tolist(), strict=True))
            records.insert(1, records[0] | {"values": row})
            client.telemetry(name, TOKEN, first, records)
            first += len(records)
        self.end(name)
        points = self._count("SELECT sum(points) FROM metric_blocks")
        assert points == steps * len(figures) + looks * len(health)
        blocks = self._count("SELECT count(*) FROM metric_blocks")
        print(
            f"sparse                  {points:10d} points in {blocks} blocks: {len(figures)} "
            f"series each step, {len(health)} each {every}"
        )
        self.disk()
        path = f"/jobs/{name}/metrics?name=fp8/*&form=buckets&max_points=50"
        assert len(self._http.get(path).json()["series"]) == len(health)
        self._time(f"  {len(health)} series, 50 buckets", path, 10)

    def latest(self, count: int) -> None:
        """The newest value of every series."""
        name = self.job("job_latest")
        client = ApiClient(self._url, self._node_key, timeout=60)
        values = {f"fp8/layers.{n}/amax": float(n) for n in range(count)}
        for step in range(1, 101):
            record = {"type": "metrics", "time": 1.0, "step": step, "values": values}
            client.telemetry(name, TOKEN, step, [record])
        path = f"/jobs/{name}/metrics/latest?limit={count}"
        items = self._http.get(path).json()["items"]
        assert len(items) == count
        assert all(item["step"] == 100 and item["points"] == 100 for item in items)
        self._time(f"latest of {count} series", path, 100)
        self.end(name)

    def delete(self, points: int) -> None:
        """A job of so many points, deleted with everything."""
        name = self.job("job_delete")
        client = ApiClient(self._url, self._node_key, timeout=60)
        rng = np.random.default_rng(2)
        first = 1
        steps = points // SERIES
        for start in range(0, steps, 2000):
            records = [
                {"type": "metrics", "time": 1.0, "step": start + n, "values": row}
                for n, row in enumerate(step_values(rng, min(2000, steps - start)))
            ]
            client.telemetry(name, TOKEN, first, records)
            first += len(records)
        self.end(name)
        held = self._count("SELECT sum(points) FROM metric_blocks WHERE job_id = %s", name)
        began = time.perf_counter()
        self._connection.execute("DELETE FROM jobs WHERE id = %s", [name])
        took = time.perf_counter() - began
        assert self._count("SELECT count(*) FROM metric_blocks WHERE job_id = %s", name) == 0
        print(f"deletion                {1000 * took:10.0f} ms for a job of {held} points")

    def _time(self, what: str, path: str, times: int) -> None:
        bare = f"{self._bare}/{path.split('/')[2]}"
        taken: dict[str, list[float]] = {bare: [], path: []}
        for _ in range(times):
            for asked, found in taken.items():
                began = time.perf_counter()
                self._http.get(asked).raise_for_status()
                found.append(1000 * (time.perf_counter() - began))
        ours, row = sorted(taken[path]), sorted(taken[bare])
        p50, of_bare = statistics.median(ours), statistics.median(row)
        print(
            f"{what:24s}{p50:10.1f} ms p50, {ours[int(len(ours) * 0.99) - 1]:.1f} ms p99, "
            f"{ours[0]:.1f} ms at best; {p50 / of_bare:.1f} of a bare row "
            f"({of_bare:.1f} ms, {row[0]:.1f} at best)"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, ALONE), default=PARTS)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--every", type=int, default=100, help="steps between looks at health")
    parser.add_argument("--read-steps", type=int, default=1_000_000)
    parser.add_argument("--looks", type=int, default=500, help="at health, of the part sparse")
    parser.add_argument("--delete-points", type=int, default=10_000_000)
    parser.add_argument("--mlflow-python")
    parser.add_argument("--mlflow-seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    if ALONE in arguments.parts and len(arguments.parts) > 1:
        parser.error(f"{ALONE} is measured alone: with --parts {ALONE}")
    if arguments.read_steps % _AT_ONCE:
        parser.error(f"--read-steps must be a multiple of {_AT_ONCE}")
    return arguments


if __name__ == "__main__":
    main()
