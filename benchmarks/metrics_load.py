"""What the benchmark of metrics writes, and processes that write at the same time."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from octrain_worker.api_client import ApiClient
from octrain_worker.supervisor.shipper import BATCH_BYTES, BATCH_RECORDS

SERIES = 500
TOKEN = 7


def step_values(rng: np.random.Generator, count: int) -> list[dict[str, float]]:
    """What so many steps record: noise, the hardest to compress, half of it exact in float32."""
    values = rng.normal(size=(count, SERIES))
    values[:, ::2] = values[:, ::2].astype(np.float32)
    names = [f"fp8/model.layers.{n // 8}.mlp.{n % 8}/amax" for n in range(SERIES)]
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]


def together(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What processes report that begin at the same moment.

    Each runs `target` with its own arguments, a mark to set when it is ready, the event of the
    common start, and a queue for its report.
    """
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    start = context.Event()
    marks = [context.Event() for _ in arguments]
    processes = [
        context.Process(target=target, args=(*own, mark, start, reports))
        for own, mark in zip(arguments, marks, strict=True)
    ]
    for process in processes:
        process.start()
    for mark in marks:
        mark.wait()
    start.set()
    found = [reports.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def write_job(
    url: str, key: str, name: str, seconds: float, ready: Event, start: Event, reports: Any
) -> None:
    """One writer: batches of the size that the supervisor ships, until the time is over.

    Reports points, seconds, batches.
    """
    client = ApiClient(url, key, timeout=60)
    rng = np.random.default_rng(os.getpid())
    sample = {"type": "metrics", "time": 1.5, "step": 1, "values": step_values(rng, 1)[0]}
    steps = max(min(BATCH_RECORDS, BATCH_BYTES // len(json.dumps(sample))), 1)
    ready.set()
    start.wait()
    began = time.perf_counter()
    step = batches = 0
    while time.perf_counter() - began < seconds:
        now = time.time()
        records = [
            {"type": "metrics", "time": now + n / 100, "step": step + n, "values": row}
            for n, row in enumerate(step_values(rng, steps), start=1)
        ]
        answer = client.telemetry(name, TOKEN, step + 1, records)
        step += steps
        batches += 1
        assert answer.acknowledged_seq == step
    reports.put((step * SERIES, time.perf_counter() - began, batches))
