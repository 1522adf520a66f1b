"""Faults of what ours build on: Postgres, Valkey, and the network between a node and the API."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, cast

import redis

from tests.chaos.proxy import State
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.faults import Faults

__all__ = ["KINDS"]


def restart_postgres(faults: Faults, fault: Fault) -> str | None:
    process = faults.stack.process("postgres")
    if not process.running or process.pid is None:
        return None
    os.kill(process.pid, signal.SIGQUIT)  # an immediate shutdown: like a crash
    process.wait(time.monotonic() + 30)
    faults.down.add("postgres")
    faults.after(fault.seconds, lambda: faults.start_again("postgres"))
    return f"immediate shutdown of process {process.pid}"


def restart_valkey(faults: Faults, fault: Fault) -> str | None:
    return faults.kill_for("valkey", fault.seconds)


def valkey_away(faults: Faults, fault: Fault) -> str | None:
    done = faults.kill_for("valkey", fault.seconds)
    if done is not None:
        faults.users.post_beside(2)
    return done


def flush_valkey(faults: Faults, fault: Fault) -> str | None:
    try:
        with redis.Redis.from_url(faults.stack.redis_url, socket_timeout=5) as server:
            keys = server.dbsize()
            server.flushall()
    except redis.RedisError:
        return None
    return f"{keys} keys forgotten"


def cut_network(faults: Faults, fault: Fault) -> str | None:
    nodes = [node for node, proxy in faults.stack.proxies.items() if proxy.state == "pass"]
    if not nodes:
        return None
    node: str = fault.choose(nodes)
    faults.stack.proxies[node].become(cast(State, fault.detail))
    faults.after(fault.seconds, lambda: _mend(faults, node))
    return node


def _mend(faults: Faults, node: str) -> None:
    faults.stack.proxies[node].become("pass")
    faults.say(f"    connected again: {node}")


KINDS = {
    "restart postgres": restart_postgres,
    "restart valkey": restart_valkey,
    "valkey away while jobs are posted": valkey_away,
    "flush valkey": flush_valkey,
    "cut network": cut_network,
    "cut network beyond the lease": cut_network,
}
