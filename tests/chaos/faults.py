"""How each fault is done to a running stack, and how it is undone.

A fault of which there is no possible victim now (no trainer runs, say) is put off for a while. Two
guards keep a trainer within its lease: its supervisor and, when that is frozen, the node's worker.
Both out of order at once on one node is more than is promised, so ``_guards`` keeps those apart.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis

from octrain.local.processes import is_alive
from octrain_api.controller.relay import BrokerUnavailable, CelerySender
from octrain_api.nodes.service import queue_of
from octrain_api.settings import BrokerSettings
from tests.chaos.proxy import State
from tests.chaos.schedule import Fault
from tests.chaos.stack import APIS, CONTROLLERS, ChaosStack
from tests.chaos.users import Users
from tests.chaos.watch import TrainerProcess, trainers

__all__ = ["Faults"]

_PUT_OFF_SECONDS = 20.0
_TRY_AGAIN_SECONDS = 0.3
# A worker that was started again looks after its supervisors when it has registered.
_WORKER_START_SECONDS = 12.0
_BALLAST = "ballast"


@dataclass(frozen=True)
class Supervisor:
    """A supervisor at work."""

    pid: int
    node: str
    job: str
    attempt: str

    def __str__(self) -> str:
        return f"{self.pid} of {self.attempt} on {self.node}"


class Faults:
    """Does the faults when they are due; to be driven by the main thread with ``tick``.

    ``struck`` are the faults that were done, ``missed`` those that found no victim.
    """

    def __init__(
        self, stack: ChaosStack, users: Users, began: float, say: Callable[[str], None]
    ) -> None:
        self.stack = stack
        self.users = users
        self.struck: list[Fault] = []
        self.missed: list[Fault] = []
        self.torn: set[str] = set()
        self._began = began
        self._say = say
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._guards: dict[str, float] = {}
        self._down: set[str] = set()
        self._looked_at = 0.0
        self._pool = ThreadPoolExecutor(4, "fault")
        self._working: list[Future[None]] = []
        self._lock = threading.Lock()

    def plan(self, faults: list[Fault]) -> None:
        for fault in faults:
            at = self._began + fault.at
            put_off = _PUT_OFF_SECONDS * (5 if fault.kind == "kill one rank of two" else 1)
            self._at(at, functools.partial(self._try, fault, at + put_off))

    @property
    def idle(self) -> bool:
        """Whether every fault has been done and undone."""
        return not self._due and all(future.done() for future in self._working)

    def tick(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        self._start_what_ended()
        for future in [future for future in self._working if future.done()]:
            self._working.remove(future)
            future.result()

    def _start_what_ended(self) -> None:
        """As ``octrain up`` does: an API that starts while Postgres is away ends by itself."""
        if time.monotonic() < self._looked_at + 1.0:
            return
        self._looked_at = time.monotonic()
        for name in self.stack.ended():
            if name not in self._down:
                self._say(f"    {name} ended by itself, and is started again")
                self.stack.restart(name)

    def _start_again(self, name: str) -> None:
        self.stack.restart(name)
        self._down.discard(name)

    def close(self) -> None:
        self._pool.shutdown()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), what))

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, what)

    def _try(self, fault: Fault, give_up_at: float) -> None:
        done = _KINDS[fault.kind](self, fault)
        if done is None and time.monotonic() < give_up_at:
            self._after(_TRY_AGAIN_SECONDS, functools.partial(self._try, fault, give_up_at))
        elif done is None:
            self._miss(fault)
        elif done:
            self._strike(fault, done)

    def _strike(self, fault: Fault, what: str) -> None:
        with self._lock:
            self.struck.append(fault)
        self._say(f"{fault}: {what}")

    def _miss(self, fault: Fault) -> None:
        with self._lock:
            self.missed.append(fault)
        self._say(f"{fault}: nothing to hit")

    # Victims

    def supervisors(self) -> list[Supervisor]:
        found = []
        for node in self.stack.nodes:
            for path in self.stack.worker_data_dir(node).glob("attempts/*/supervisor.json"):
                if (path.parent / "finished.json").exists():
                    continue
                with contextlib.suppress(OSError, ValueError, KeyError):
                    record = json.loads(path.read_text())
                    if is_alive(record["pid"]):
                        found.append(
                            Supervisor(record["pid"], node, record["job_id"], record["attempt_id"])
                        )
        return sorted(found, key=lambda one: one.attempt)

    def trainers(self) -> list[TrainerProcess]:
        ours = {job.id for job in self.users.jobs}
        return sorted(
            (t for t in trainers(self.stack.data_dir) if t.job in ours), key=lambda one: one.attempt
        )

    def _guard_is_free(self, node: str) -> bool:
        return time.monotonic() >= self._guards.get(node, 0.0)

    def _take_guard(self, node: str, seconds: float) -> None:
        self._guards[node] = time.monotonic() + seconds

    # Kills

    def _kill_for(self, name: str, seconds: float) -> str | None:
        if not self.stack.is_running(name):
            return None
        pid = self.stack.kill(name)
        self._down.add(name)
        self._after(seconds, lambda: self._start_again(name))
        return f"{name}, process {pid}"

    def kill_api(self, fault: Fault) -> str | None:
        return self._kill_for(_pick(APIS, fault), fault.seconds)

    def kill_both_apis(self, fault: Fault) -> str | None:
        if not all(self.stack.is_running(name) for name in APIS):
            return None
        return " and ".join(str(self._kill_for(name, fault.seconds)) for name in APIS)

    def kill_controller(self, fault: Fault) -> str | None:
        return self._kill_for(_pick(CONTROLLERS, fault), fault.seconds)

    def kill_worker(self, fault: Fault) -> str | None:
        nodes = [
            node
            for node in self.stack.nodes
            if self._guard_is_free(node) and self.stack.is_running(f"worker-{node}")
        ]
        if not nodes:
            return None
        node = _pick(nodes, fault)
        self._take_guard(node, fault.seconds + _WORKER_START_SECONDS)
        return self._kill_for(f"worker-{node}", fault.seconds)

    def kill_supervisor(self, fault: Fault) -> str | None:
        found = self.supervisors()
        if not found:
            return None
        victim = _pick(found, fault)
        return str(victim) if _signal(victim.pid, signal.SIGKILL) else None

    def kill_trainer(self, fault: Fault) -> str | None:
        found = self.trainers()
        if not found:
            return None
        victim = _pick(found, fault)
        done = _signal(victim.pid, signal.SIGKILL)
        return f"{victim.pid} of {victim.attempt}" if done else None

    def kill_rank(self, fault: Fault) -> str | None:
        """SIGKILL of a process that the trainer's first one has started, of those that train."""
        found = self.trainers()
        pids = {one.pid for one in found}
        ranks = [one for one in found if one.parent in pids]
        if not ranks:
            return None
        victim = _pick(ranks, fault)
        done = _signal(victim.pid, signal.SIGKILL)
        return f"{victim.pid} of {victim.attempt}" if done else None

    def kill_supervisor_and_trainer(self, fault: Fault) -> str | None:
        found = self.trainers()
        pids = {one.attempt: one for one in self.supervisors()}
        found = [one for one in found if one.attempt in pids]
        if not found:
            return None
        trainer = _pick(found, fault)
        supervisor = pids[trainer.attempt]
        _signal(supervisor.pid, signal.SIGKILL)
        _signal(trainer.pid, signal.SIGKILL)
        return f"{supervisor} and its trainer {trainer.pid}"

    # Freezes

    def freeze_supervisor(self, fault: Fault) -> str | None:
        busy = {one.attempt for one in self.trainers()}
        found = [
            one
            for one in self.supervisors()
            if self._guard_is_free(one.node)
            and one.attempt in busy
            and self.stack.is_running(f"worker-{one.node}")
        ]
        if not found:
            return None
        victim = _pick(found, fault)
        if not _signal(victim.pid, signal.SIGSTOP):
            return None
        self._take_guard(victim.node, fault.seconds)
        self._after(fault.seconds, lambda: self._thaw(victim.pid, str(victim)))
        return str(victim)

    def freeze_worker(self, fault: Fault) -> str | None:
        nodes = [
            node
            for node in self.stack.nodes
            if self._guard_is_free(node) and self.stack.is_running(f"worker-{node}")
        ]
        if not nodes:
            return None
        node = _pick(nodes, fault)
        pid = self.stack.process(f"worker-{node}").pid
        if pid is None or not _signal(pid, signal.SIGSTOP):
            return None
        self._take_guard(node, fault.seconds + 1.0)
        self._after(fault.seconds, lambda: self._thaw(pid, f"worker-{node}"))
        return f"worker-{node}, process {pid}"

    def _thaw(self, pid: int, what: str) -> None:
        if _signal(pid, signal.SIGCONT):
            self._say(f"    awake again: {what}")

    # Servers

    def restart_postgres(self, fault: Fault) -> str | None:
        process = self.stack.process("postgres")
        if not process.running or process.pid is None:
            return None
        os.kill(process.pid, signal.SIGQUIT)  # an immediate shutdown: like a crash
        process.wait(time.monotonic() + 30)
        self._down.add("postgres")
        self._after(fault.seconds, lambda: self._start_again("postgres"))
        return f"immediate shutdown of process {process.pid}"

    def restart_valkey(self, fault: Fault) -> str | None:
        return self._kill_for("valkey", fault.seconds)

    def valkey_away(self, fault: Fault) -> str | None:
        done = self._kill_for("valkey", fault.seconds)
        if done is not None:
            self.users.post_beside(2)
        return done

    def flush_valkey(self, fault: Fault) -> str | None:
        try:
            with redis.Redis.from_url(self.stack.redis_url, socket_timeout=5) as server:
                keys = server.dbsize()
                server.flushall()
        except redis.RedisError:
            return None
        return f"{keys} keys forgotten"

    # Network, messages, disks

    def cut_network(self, fault: Fault) -> str | None:
        nodes = [node for node, proxy in self.stack.proxies.items() if proxy.state == "pass"]
        if not nodes:
            return None
        node: str = _pick(nodes, fault)
        self.stack.proxies[node].become(cast(State, fault.detail))
        self._after(fault.seconds, lambda: self._mend(node))
        return node

    def _mend(self, node: str) -> None:
        self.stack.proxies[node].become("pass")
        self._say(f"    connected again: {node}")

    def deliver_twice(self, fault: Fault) -> str | None:
        return self._beside(fault, self._deliver_twice)

    def _deliver_twice(self, fault: Fault) -> str | None:
        api = self.users.api
        nodes = {node["name"]: node["id"] for node in api.get("/nodes")["items"]}
        jobs = api.get("/jobs", status="starting,running", limit=100)["items"]
        if not jobs:
            return None
        job = _pick(jobs, fault)
        attempt = job["attempts"][-1]
        payload = {"job_id": job["id"], "attempt_id": attempt["id"], "attempt": attempt["number"]}
        sender = CelerySender(BrokerSettings(url=self.stack.redis_url))
        try:
            for copy in range(2):
                task = f"{attempt['id']}-copy-{copy}"
                sender.send(queue_of(nodes[attempt["node"]]), task, payload)
        except BrokerUnavailable:
            return None
        finally:
            sender.close()
        return f"{attempt['id']} of {job['id']} to {attempt['node']}, two copies"

    def tear_checkpoint(self, fault: Fault) -> str | None:
        return self._beside(fault, self._tear_checkpoint)

    def _tear_checkpoint(self, fault: Fault) -> str | None:
        """Damage the newest checkpoint in the store of a job that trains, and kill its trainer."""
        found = self.trainers()
        if not found:
            return None
        trainer = _pick(found, fault)
        artifacts = self.users.api.get(f"/jobs/{trainer.job}/artifacts")["items"]
        checkpoints = [one for one in artifacts if one["kind"] == "checkpoint"]
        if not checkpoints:
            return None
        newest = max(checkpoints, key=lambda one: (one["step"], one["created_at"]))
        if newest["id"] in self.torn or not newest["files"]:
            return None
        self.torn.add(newest["id"])
        name = newest["files"][0]["path"]
        path = Path(urlsplit(newest["url"]).path) / name
        try:
            data = bytearray(path.read_bytes())
        except FileNotFoundError:
            return None  # newer ones have taken its place meanwhile
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
        _signal(trainer.pid, signal.SIGKILL)
        return f"{newest['name']} of {trainer.job} ({name}), and trainer {trainer.pid} killed"

    def _beside(self, fault: Fault, work: Callable[[Fault], str | None]) -> str:
        """In a thread, for it asks the API, which may be away; "" says that it is under way."""
        give_up_at = time.monotonic() + _PUT_OFF_SECONDS

        def run() -> None:
            while (done := work(fault)) is None:
                if time.monotonic() > give_up_at:
                    self._miss(fault)
                    return
                time.sleep(_TRY_AGAIN_SECONDS)
            self._strike(fault, done)

        self._working.append(self._pool.submit(run))
        return ""

    def fill_disk(self, fault: Fault) -> str | None:
        folder = self.stack.small_disk
        if folder is None or (folder / _BALLAST).exists():
            return None
        written = 0
        with (folder / _BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                written += file.write(bytes(1 << 16))
        self._after(fault.seconds, lambda: (folder / _BALLAST).unlink())
        return f"{written >> 10} KiB of ballast on {self.stack.nodes[-1]}"


def _pick(candidates: Any, fault: Fault) -> Any:
    return candidates[int(fault.pick * len(candidates))]


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


_KINDS: dict[str, Callable[[Faults, Fault], str | None]] = {
    "kill api": Faults.kill_api,
    "kill both apis": Faults.kill_both_apis,
    "kill controller": Faults.kill_controller,
    "kill celery worker": Faults.kill_worker,
    "kill supervisor": Faults.kill_supervisor,
    "kill trainer": Faults.kill_trainer,
    "kill one rank of two": Faults.kill_rank,
    "kill supervisor and trainer": Faults.kill_supervisor_and_trainer,
    "freeze supervisor": Faults.freeze_supervisor,
    "freeze supervisor beyond its lease": Faults.freeze_supervisor,
    "freeze celery worker": Faults.freeze_worker,
    "restart postgres": Faults.restart_postgres,
    "restart valkey": Faults.restart_valkey,
    "valkey away while jobs are posted": Faults.valkey_away,
    "flush valkey": Faults.flush_valkey,
    "cut network": Faults.cut_network,
    "cut network beyond the lease": Faults.cut_network,
    "deliver a message twice": Faults.deliver_twice,
    "fill a node's disk": Faults.fill_disk,
    "tear the newest checkpoint": Faults.tear_checkpoint,
}
