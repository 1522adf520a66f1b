"""How many points a second the service stores, how fast it reads them, what they take on disk.

A real Postgres with fsync on, one real API process, one controller that compacts meanwhile, all on
this machine. Each writer is a process of its own, for one job of 500 series with steps in order;
its bodies are built and sent by the supervisor's own code, inside the time that is measured. Half
of the series have values that float32 holds exactly, as a GPU computes them, half any float64.

The peer is MLflow's tracking server on the same Postgres in the same run: as many writers, each for
one run, POST `runs/log-batch` with ready-made bodies, at the best of several batch sizes (MLflow
takes 1000 metrics a batch at most).

    python benchmarks/metrics.py [--parts store read delete] [--seconds 30] [--mlflow-python PATH]

`--mlflow-python` names a Python that has mlflow and psycopg2; without it, or without the part
`store`, there is no ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg

from octrain.local.ports import free_port
from octrain.local.servers import LocalServers
from octrain_api.migrate import migrate
from octrain_api.settings import DatabaseSettings
from octrain_worker.api_client import ApiClient
from octrain_worker.supervisor.shipper import BATCH_BYTES, BATCH_RECORDS

REPOSITORY = Path(__file__).parents[1]
SERIES = 500
TOKEN = 7
MLFLOW_SIZES = (250, 500, 1000)
PARTS = ("store", "read", "delete")
_TABLES = ("metric_layouts", "metric_series", "metric_blocks", "metric_rollups")


def main() -> None:
    arguments = _arguments()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name, LocalServers(Path(name)) as servers:
        url = servers.postgres_url
        migrate(DatabaseSettings(url=url))
        with psycopg.connect(url, autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                assert connection.execute(f"SHOW {setting}").fetchone() == ("on",), setting
            with _service(servers, Path(name)) as service:
                bench = Bench(connection, *service)
                ours = 0.0
                if "store" in arguments.parts:
                    ours = bench.ingest(arguments.writers, arguments.seconds)
                    bench.disk()
                if "read" in arguments.parts:
                    bench.read(arguments.read_steps)
                    bench.latest(2000)
                if "delete" in arguments.parts:
                    bench.delete(10_000_000)
        if arguments.mlflow_python is not None and ours:
            peer = _mlflow(servers, Path(name), arguments)
            print(f"ratio to MLflow         {ours / peer:10.1f}")


@contextmanager
def _service(servers: LocalServers, folder: Path) -> Iterator[tuple[str, str, str]]:
    """The API and the controller as processes: the API's URL, a user's key and a node's key."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "api")]),
        "DATABASE_URL": servers.postgres_url,
        "REDIS_URL": servers.redis_url,
        "OCTRAIN_ARTIFACT_URL": folder.as_uri(),
        "OCTRAIN_RATE_LIMIT_READ": "0",
        "OCTRAIN_RATE_LIMIT_WORKER": "0",
    }
    command = [sys.executable, "-m", "octrain_api"]
    keys = [
        json.loads(
            subprocess.run(
                [*command, "create-key", "--name", "b", "--owner", "o", "--scopes", scopes],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )["key"]
        for scopes in ("jobs:read,jobs:write", "node")
    ]
    with (folder / "service.log").open("w") as log:
        processes = [
            subprocess.Popen([*command, *rest], env=environment, stderr=log)
            for rest in (["serve", "--port", str(port)], ["controller"])
        ]
        try:
            url = f"http://127.0.0.1:{port}"
            _await(lambda: httpx.get(f"{url}/healthz").status_code == 200)
            yield url, keys[0], keys[1]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def _await(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise SystemExit("a server did not come up, or did not finish, in time")


class Bench:
    """The measurements of our service."""

    def __init__(self, connection: psycopg.Connection[Any], url: str, user: str, node: str) -> None:
        self._connection = connection
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
        _await(lambda: self._count("SELECT count(*) FROM metric_blocks WHERE tier < 100") == 0)

    def _count(self, query: str, *values: str) -> int:
        row = self._connection.execute(query.encode(), values or None).fetchone()
        assert row is not None
        return int(row[0] or 0)

    def ingest(self, writers: int, seconds: float) -> float:
        """Points a second, sustained with the compaction at work."""
        names = [self.job(f"job_w{n}") for n in range(writers)]
        context = multiprocessing.get_context("spawn")
        ready = [context.Event() for _ in names]
        start = context.Event()
        counts: Any = context.Queue()
        processes = [
            context.Process(
                target=_write,
                args=(self._url, self._node_key, name, seconds, mark, start, counts),
            )
            for name, mark in zip(names, ready, strict=True)
        ]
        for process in processes:
            process.start()
        for mark in ready:
            mark.wait()
        start.set()
        results = [counts.get() for _ in processes]
        for process in processes:
            process.join()
        points = sum(result[0] for result in results)
        took = max(result[1] for result in results)
        open_blocks = self._count("SELECT count(*) FROM metric_blocks WHERE tier < 100")
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
            f"{open_blocks} blocks open at the end"
        )
        return float(points / took)

    def disk(self) -> None:
        """Bytes a point with indexes and TOAST, once compacted."""
        points = self._count("SELECT sum(points) FROM metric_blocks")
        for when in ("", "VACUUM ", "VACUUM FULL "):
            if when:
                self._connection.execute(f"{when}{', '.join(_TABLES)}".encode())
            size = sum(
                self._count("SELECT pg_total_relation_size(%s::regclass)", table)
                for table in _TABLES
            )
            label = f"disk, after {when.strip()}" if when else "disk, compacted"
            print(f"{label:24s}{size / points:10.2f} bytes a point")

    def read(self, steps: int) -> None:
        """One series of a million points as 1000 buckets."""
        name = self.job("job_read")
        client = ApiClient(self._url, self._node_key, timeout=60)
        rng = np.random.default_rng(1)
        names = [f"train/m{n}" for n in range(8)]
        # Now and then a row of 500 series: blocks are then cut as they are in such a job.
        wide = {f"fp8/layers.{n}/amax": 1.0 for n in range(SERIES - 8)}
        first = 1
        for start in range(0, steps, 4000):
            values = rng.normal(size=(4000, 8)).tolist()
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
        for start in range(0, points // SERIES, 2000):
            records = [
                {"type": "metrics", "time": 1.0, "step": start + n, "values": row}
                for n, row in enumerate(_values(rng, 2000))
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
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            self._http.get(path).raise_for_status()
            taken.append(1000 * (time.perf_counter() - began))
        taken.sort()
        print(
            f"{what:24s}{statistics.median(taken):10.1f} ms p50, "
            f"{taken[int(len(taken) * 0.99) - 1]:.1f} ms p99, {taken[0]:.1f} ms at best"
        )


def _values(rng: np.random.Generator, count: int) -> list[dict[str, float]]:
    """What so many steps record: noise, the hardest to compress."""
    values = rng.normal(size=(count, SERIES))
    values[:, ::2] = values[:, ::2].astype(np.float32)
    names = [f"fp8/model.layers.{n // 8}.mlp.{n % 8}/amax" for n in range(SERIES)]
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]


def _write(
    url: str, key: str, name: str, seconds: float, ready: Event, start: Event, counts: Any
) -> None:
    """One writer: batches of the size that the supervisor ships, until the time is over."""
    client = ApiClient(url, key, timeout=60)
    rng = np.random.default_rng(os.getpid())
    sample = {"type": "metrics", "time": 1.5, "step": 1, "values": _values(rng, 1)[0]}
    line = len(json.dumps(sample))
    steps = max(min(BATCH_RECORDS, BATCH_BYTES // line), 1)
    ready.set()
    start.wait()
    began = time.perf_counter()
    step = batches = 0
    while time.perf_counter() - began < seconds:
        now = time.time()
        records = [
            {"type": "metrics", "time": now + n / 100, "step": step + n, "values": row}
            for n, row in enumerate(_values(rng, steps), start=1)
        ]
        answer = client.telemetry(name, TOKEN, step + 1, records)
        step += steps
        batches += 1
        assert answer.acknowledged_seq == step
    counts.put((step * SERIES, time.perf_counter() - began, batches))


def _mlflow(servers: LocalServers, folder: Path, arguments: argparse.Namespace) -> float:
    """Points a second of MLflow's server at its best batch size."""
    database = servers.create_database("mlflow")
    database = database.replace("postgresql://", "postgresql+psycopg2://", 1)
    port = free_port()
    python = arguments.mlflow_python
    version = subprocess.run(
        [python, "-c", "import mlflow; print(mlflow.__version__)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    command = [python, "-m", "mlflow", "server", "--backend-store-uri", database]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    command += ["--default-artifact-root", folder.as_uri()]
    best = 0.0
    with (folder / "mlflow.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(lambda: httpx.get(f"{url}/health").status_code == 200)
            for size in MLFLOW_SIZES:
                rate = _mlflow_rate(url, size, arguments)
                print(f"MLflow {version:8s}         {rate:10.0f} /s in batches of {size}")
                best = max(best, rate)
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)
    return best


def _mlflow_rate(url: str, size: int, arguments: argparse.Namespace) -> float:
    context = multiprocessing.get_context("spawn")
    counts: Any = context.Queue()
    start = context.Event()
    ready = [context.Event() for _ in range(arguments.writers)]
    processes = [
        context.Process(
            target=_mlflow_write, args=(url, size, arguments.mlflow_seconds, mark, start, counts)
        )
        for mark in ready
    ]
    for process in processes:
        process.start()
    for mark in ready:
        mark.wait()
    start.set()
    results = [counts.get() for _ in processes]
    for process in processes:
        process.join()
    return float(sum(r[0] for r in results) / max(r[1] for r in results))


def _mlflow_write(
    url: str, size: int, seconds: float, ready: Event, start: Event, counts: Any
) -> None:
    with httpx.Client(base_url=f"{url}/api/2.0/mlflow", timeout=60) as http:
        made = http.post("/runs/create", json={"experiment_id": "0", "start_time": 0})
        run_id = made.raise_for_status().json()["run"]["info"]["run_id"]
        pool = _values(np.random.default_rng(3), 100)
        points = [
            (name, step, value) for step, row in enumerate(pool) for name, value in row.items()
        ]
        ready.set()
        start.wait()
        began = time.perf_counter()
        sent = lap = 0
        spent = 0.0
        while time.perf_counter() - began - spent < seconds:
            building = time.perf_counter()
            place = sent % len(points)
            lap = sent // len(points) * len(pool)
            body = json.dumps(
                {
                    "run_id": run_id,
                    "metrics": [
                        {"key": name, "value": value, "timestamp": 1, "step": step + lap}
                        for name, step, value in points[place : place + size]
                    ],
                }
            )
            # The peer's time is the server's alone: its bodies are not counted.
            spent += time.perf_counter() - building
            http.post(
                "/runs/log-batch", content=body, headers={"Content-Type": "application/json"}
            ).raise_for_status()
            sent += min(size, len(points) - place)
        counts.put((sent, time.perf_counter() - began - spent))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--read-steps", type=int, default=1_000_000)
    parser.add_argument("--mlflow-python")
    parser.add_argument("--mlflow-seconds", type=float, default=10.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
