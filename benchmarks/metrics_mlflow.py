"""The peer of the benchmark of metrics: MLflow's tracking server on the same Postgres."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from metrics_load import step_values, together
from metrics_service import wait_until

from octrain.local.ports import free_port
from octrain.local.servers import LocalServers

_SIZES = (250, 500, 1000)


def mlflow_rate(servers: LocalServers, folder: Path, arguments: argparse.Namespace) -> float:
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
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            for size in _SIZES:
                rate = _rate(url, size, arguments)
                print(f"MLflow {version:8s}         {rate:10.0f} /s in batches of {size}")
                best = max(best, rate)
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)
    return best


def _rate(url: str, size: int, arguments: argparse.Namespace) -> float:
    found = together(_write, [(url, size, arguments.mlflow_seconds)] * arguments.writers)
    return float(sum(report[0] for report in found) / max(report[1] for report in found))


def _write(url: str, size: int, seconds: float, ready: Event, start: Event, reports: Any) -> None:
    with httpx.Client(base_url=f"{url}/api/2.0/mlflow", timeout=60) as http:
        made = http.post("/runs/create", json={"experiment_id": "0", "start_time": 0})
        run_id = made.raise_for_status().json()["run"]["info"]["run_id"]
        pool = step_values(np.random.default_rng(3), 100)
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
        reports.put((sent, time.perf_counter() - began - spent))
