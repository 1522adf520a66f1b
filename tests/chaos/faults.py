"""When each fault is done to a running stack, and to whom.

What is done, and undone, stands by kind in ``process_faults``, ``server_faults`` and
``data_faults``. A fault of which there is no possible victim now (no trainer runs, say) is put off
for a while. Two guards keep a trainer within its lease: its supervisor and, when that is frozen,
the node's worker. Both out of order at once on one node is more than is promised, so ``take_guard``
keeps those apart.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from octrain.local.processes import is_alive
from tests.chaos import data_faults, process_faults, server_faults
from tests.chaos.schedule import Fault
from tests.chaos.stack import ChaosStack
from tests.chaos.users import Users
from tests.chaos.watch import TrainerProcess, trainers

__all__ = ["Faults"]

_PUT_OFF_SECONDS = 20.0
_TRY_AGAIN_SECONDS = 0.3

KINDS: dict[str, Callable[[Faults, Fault], str | None]] = {
    **process_faults.KINDS,
    **server_faults.KINDS,
    **data_faults.KINDS,
}


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

    ``struck`` are the faults that were done, ``missed`` those that found no victim; ``down`` names
    the processes that are to be down for now, ``torn`` the artifacts that were damaged.
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
        self.say = say
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._guards: dict[str, float] = {}
        self.down: set[str] = set()
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
            if name not in self.down:
                self.say(f"    {name} ended by itself, and is started again")
                self.stack.restart(name)

    def start_again(self, name: str) -> None:
        """End the time for which a process was to be down."""
        self.stack.restart(name)
        self.down.discard(name)

    def close(self) -> None:
        self._pool.shutdown()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Have ``tick`` do it in so many seconds."""
        self._at(time.monotonic() + seconds, what)

    def _try(self, fault: Fault, give_up_at: float) -> None:
        done = KINDS[fault.kind](self, fault)
        if done is None and time.monotonic() < give_up_at:
            self.after(_TRY_AGAIN_SECONDS, functools.partial(self._try, fault, give_up_at))
        elif done is None:
            self._miss(fault)
        elif done:
            self._strike(fault, done)

    def _strike(self, fault: Fault, what: str) -> None:
        with self._lock:
            self.struck.append(fault)
        self.say(f"{fault}: {what}")

    def _miss(self, fault: Fault) -> None:
        with self._lock:
            self.missed.append(fault)
        self.say(f"{fault}: nothing to hit")

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

    def guard_is_free(self, node: str) -> bool:
        """Whether both guards of the node's leases are in order."""
        return time.monotonic() >= self._guards.get(node, 0.0)

    def take_guard(self, node: str, seconds: float) -> None:
        """Put one of the node's guards out of order for so long."""
        self._guards[node] = time.monotonic() + seconds

    # What the kinds of faults are made of

    def kill_for(self, name: str, seconds: float) -> str | None:
        """SIGKILL of a process of the stack, which is started again in so many seconds."""
        if not self.stack.is_running(name):
            return None
        pid = self.stack.kill(name)
        self.down.add(name)
        self.after(seconds, lambda: self.start_again(name))
        return f"{name}, process {pid}"

    def beside(self, fault: Fault, work: Callable[[Fault], str | None]) -> str:
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
