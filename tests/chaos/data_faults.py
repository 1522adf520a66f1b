"""Faults of what is sent and stored: messages that come again, full disks, torn checkpoints."""

from __future__ import annotations

import contextlib
import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octrain_api.controller.relay import BrokerUnavailable, CelerySender
from octrain_api.nodes.service import queue_of
from octrain_api.settings import BrokerSettings
from tests.chaos.process_faults import signal_process
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.faults import Faults

__all__ = ["KINDS"]

_BALLAST = "ballast"


def deliver_twice(faults: Faults, fault: Fault) -> str | None:
    return faults.beside(fault, functools.partial(_deliver_twice, faults))


def _deliver_twice(faults: Faults, fault: Fault) -> str | None:
    api = faults.users.api
    nodes = {node["name"]: node["id"] for node in api.get("/nodes")["items"]}
    jobs = api.get("/jobs", status="starting,running", limit=100)["items"]
    if not jobs:
        return None
    job = fault.choose(jobs)
    attempt = job["attempts"][-1]
    payload = {"job_id": job["id"], "attempt_id": attempt["id"], "attempt": attempt["number"]}
    sender = CelerySender(BrokerSettings(url=faults.stack.redis_url))
    try:
        for copy in range(2):
            task = f"{attempt['id']}-copy-{copy}"
            sender.send(queue_of(nodes[attempt["node"]]), task, payload)
    except BrokerUnavailable:
        return None
    finally:
        sender.close()
    return f"{attempt['id']} of {job['id']} to {attempt['node']}, two copies"


def tear_checkpoint(faults: Faults, fault: Fault) -> str | None:
    return faults.beside(fault, functools.partial(_tear_checkpoint, faults))


def _tear_checkpoint(faults: Faults, fault: Fault) -> str | None:
    """Damage the newest checkpoint in the store of a job that trains, and kill its trainer."""
    found = faults.trainers()
    if not found:
        return None
    trainer = fault.choose(found)
    artifacts = faults.users.api.get(f"/jobs/{trainer.job}/artifacts")["items"]
    checkpoints = [one for one in artifacts if one["kind"] == "checkpoint"]
    if not checkpoints:
        return None
    newest = max(checkpoints, key=lambda one: (one["step"], one["created_at"]))
    if newest["id"] in faults.torn or not newest["files"]:
        return None
    faults.torn.add(newest["id"])
    name = newest["files"][0]["path"]
    path = Path(urlsplit(newest["url"]).path) / name
    try:
        data = bytearray(path.read_bytes())
    except FileNotFoundError:
        return None  # newer ones have taken its place meanwhile
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    signal_process(trainer.pid, signal.SIGKILL)
    return f"{newest['name']} of {trainer.job} ({name}), and trainer {trainer.pid} killed"


def fill_disk(faults: Faults, fault: Fault) -> str | None:
    folder = faults.stack.small_disk
    if folder is None or (folder / _BALLAST).exists():
        return None
    written = 0
    with (folder / _BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            written += file.write(bytes(1 << 16))
    faults.after(fault.seconds, lambda: (folder / _BALLAST).unlink())
    return f"{written >> 10} KiB of ballast on {faults.stack.nodes[-1]}"


KINDS = {
    "deliver a message twice": deliver_twice,
    "fill a node's disk": fill_disk,
    "tear the newest checkpoint": tear_checkpoint,
}
