"""Faults of our own processes: SIGKILL of each of them, SIGSTOP of those that guard a lease."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.chaos.schedule import Fault
from tests.chaos.stack import APIS, CONTROLLERS

if TYPE_CHECKING:
    from tests.chaos.faults import Faults

__all__ = ["KINDS", "signal_process"]

# A worker that was started again looks after its supervisors when it has registered.
_WORKER_START_SECONDS = 12.0


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_api(faults: Faults, fault: Fault) -> str | None:
    return faults.kill_for(fault.choose(APIS), fault.seconds)


def kill_both_apis(faults: Faults, fault: Fault) -> str | None:
    if not all(faults.stack.is_running(name) for name in APIS):
        return None
    return " and ".join(str(faults.kill_for(name, fault.seconds)) for name in APIS)


def kill_controller(faults: Faults, fault: Fault) -> str | None:
    return faults.kill_for(fault.choose(CONTROLLERS), fault.seconds)


def kill_worker(faults: Faults, fault: Fault) -> str | None:
    nodes = [
        node
        for node in faults.stack.nodes
        if faults.guard_is_free(node) and faults.stack.is_running(f"worker-{node}")
    ]
    if not nodes:
        return None
    node = fault.choose(nodes)
    faults.take_guard(node, fault.seconds + _WORKER_START_SECONDS)
    return faults.kill_for(f"worker-{node}", fault.seconds)


def kill_supervisor(faults: Faults, fault: Fault) -> str | None:
    found = faults.supervisors()
    if not found:
        return None
    victim = fault.choose(found)
    return str(victim) if signal_process(victim.pid, signal.SIGKILL) else None


def kill_trainer(faults: Faults, fault: Fault) -> str | None:
    found = faults.trainers()
    if not found:
        return None
    victim = fault.choose(found)
    done = signal_process(victim.pid, signal.SIGKILL)
    return f"{victim.pid} of {victim.attempt}" if done else None


def kill_rank(faults: Faults, fault: Fault) -> str | None:
    """SIGKILL of a process that the trainer's first one has started, of those that train."""
    found = faults.trainers()
    pids = {one.pid for one in found}
    ranks = [one for one in found if one.parent in pids]
    if not ranks:
        return None
    victim = fault.choose(ranks)
    done = signal_process(victim.pid, signal.SIGKILL)
    return f"{victim.pid} of {victim.attempt}" if done else None


def kill_supervisor_and_trainer(faults: Faults, fault: Fault) -> str | None:
    found = faults.trainers()
    pids = {one.attempt: one for one in faults.supervisors()}
    found = [one for one in found if one.attempt in pids]
    if not found:
        return None
    trainer = fault.choose(found)
    supervisor = pids[trainer.attempt]
    signal_process(supervisor.pid, signal.SIGKILL)
    signal_process(trainer.pid, signal.SIGKILL)
    return f"{supervisor} and its trainer {trainer.pid}"


def freeze_supervisor(faults: Faults, fault: Fault) -> str | None:
    busy = {one.attempt for one in faults.trainers()}
    found = [
        one
        for one in faults.supervisors()
        if faults.guard_is_free(one.node)
        and one.attempt in busy
        and faults.stack.is_running(f"worker-{one.node}")
    ]
    if not found:
        return None
    victim = fault.choose(found)
    if not signal_process(victim.pid, signal.SIGSTOP):
        return None
    faults.take_guard(victim.node, fault.seconds)
    faults.after(fault.seconds, lambda: _thaw(faults, victim.pid, str(victim)))
    return str(victim)


def freeze_worker(faults: Faults, fault: Fault) -> str | None:
    nodes = [
        node
        for node in faults.stack.nodes
        if faults.guard_is_free(node) and faults.stack.is_running(f"worker-{node}")
    ]
    if not nodes:
        return None
    node = fault.choose(nodes)
    pid = faults.stack.process(f"worker-{node}").pid
    if pid is None or not signal_process(pid, signal.SIGSTOP):
        return None
    faults.take_guard(node, fault.seconds + 1.0)
    faults.after(fault.seconds, lambda: _thaw(faults, pid, f"worker-{node}"))
    return f"worker-{node}, process {pid}"


def _thaw(faults: Faults, pid: int, what: str) -> None:
    if signal_process(pid, signal.SIGCONT):
        faults.say(f"    awake again: {what}")


KINDS = {
    "kill api": kill_api,
    "kill both apis": kill_both_apis,
    "kill controller": kill_controller,
    "kill celery worker": kill_worker,
    "kill supervisor": kill_supervisor,
    "kill trainer": kill_trainer,
    "kill one rank of two": kill_rank,
    "kill supervisor and trainer": kill_supervisor_and_trainer,
    "freeze supervisor": freeze_supervisor,
    "freeze supervisor beyond its lease": freeze_supervisor,
    "freeze celery worker": freeze_worker,
}
