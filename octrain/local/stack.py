"""Everything on one machine: Postgres, Valkey, the API, the controller and workers.

    with LocalStack(folder, roots=[data]) as stack:
        client = octrain.Client(stack.url, stack.api_key)

``octrain up`` is this plus a person at a terminal. All children are started from the main thread
(see ``processes``), so ``start``, ``restart`` and ``run`` belong there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from octrain.client import Client, OctrainError
from octrain.local.accounts import choose_account
from octrain.local.bootstrap import begin_first_key, finish_first_key, lock_folder, migrate
from octrain.local.commands import base_environment, module, require_servers
from octrain.local.errors import LocalStackError
from octrain.local.leftovers import end_leftovers
from octrain.local.logs import rotate
from octrain.local.ports import LOOPBACK, free_port, is_free
from octrain.local.postgres import PostgresServer
from octrain.local.processes import ManagedProcess
from octrain.local.restarts import Restarts
from octrain.local.state import StackState
from octrain.local.valkey import ValkeyServer

START_SECONDS = 60.0
# An orderly stop: until when, in seconds from its begin, each kind may take before it is killed.
WORKERS_STOPPED_AT = 6.0
SERVERS_STOPPED_AT = 7.5
DATABASES_STOPPED_AT = 9.5
# A process that is started again and is no server is called up once it has run so long.
_STAYS_SECONDS = 2.0
_SCHEMA_MISMATCH = 3  # exit status of `python -m octrain_api serve` on another schema

OnEvent = Callable[[str], None]


class LocalStack:
    """One stack on one data folder.

    ``port`` 0 keeps the last start's port when it is free, else takes any. ``roots`` are the
    folders that specs may read. ``workers`` are node names, one worker process each.
    ``database_url`` and ``redis_url`` name servers to use instead of starting them.
    ``environment`` is added to every child's. ``on_event`` hears what a person should know.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        roots: Sequence[Path] = (),
        workers: Sequence[str] = ("local",),
        artifact_url: str | None = None,
        database_url: str | None = None,
        redis_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.data_dir = data_dir.expanduser().absolute()
        self.host, self.port = host, port
        self.roots = [root.expanduser().resolve() for root in roots]
        self.worker_names = list(workers)
        self.artifact_url = artifact_url or (self.data_dir / "artifacts").as_uri()
        self.state = StackState()
        self.postgres: PostgresServer | None = None
        self.valkey: ValkeyServer | None = None
        self.created_key = False
        self._database_url, self._redis_url = database_url, redis_url
        self._environment = dict(environment or {})
        self._on_event = on_event or (lambda message: None)
        self._processes: dict[str, ManagedProcess] = {}
        self._lock: int | None = None
        self._restarts = Restarts({})
        # What was started again, and since when, until it is said to be up.
        self._returning: dict[str, float] = {}

    @property
    def url(self) -> str:
        """http://host:port, as a client on this machine reaches it."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def api_key(self) -> str:
        """A key with the scopes jobs:read, jobs:write and admin."""
        return self.state.api.key

    @property
    def node_key(self) -> str:
        """The key of the first worker's node, with the scope node."""
        return next(iter(self.state.api.node_keys.values()), "")

    @property
    def database_url(self) -> str:
        if self._database_url:
            return self._database_url
        return self.postgres.url() if self.postgres is not None else ""

    @property
    def redis_url(self) -> str:
        if self._redis_url:
            return self._redis_url
        return self.valkey.url() if self.valkey is not None else ""

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    def process(self, name: str) -> ManagedProcess:
        """``postgres``, ``valkey``, ``api``, ``controller`` or ``worker-<node name>``."""
        return self._processes[name]

    def worker_data_dir(self, worker: str) -> Path:
        return self.data_dir / "workers" / worker

    # Start

    def start(self) -> None:
        """Start everything and return when the API answers. Errors: LocalStackError."""
        require_servers()
        self._take_folder()
        try:
            # Before anything is started for nothing.
            self._settle_port()
            self._start_databases()
            known = self._keys_are_known()
            first_key = None if known else self._begin_first_key()
            # Its imports take longer than the migration. Should it look at the schema before that
            # is over, it ends, and is started again like one that meets an older schema.
            self._start_process("api", self._api_command(), self._server_environment())
            if first_key is None:
                # Those that have keys need not wait for the API.
                self._start_workers(self.state.api.node_keys)
            else:
                self.state.api.node_keys = {}
                self.state.api.key = finish_first_key(first_key, self.logs / "migrate.log")
                self.created_key = True
            self._await_api()
            self._start_workers()
            self._start_process(
                "controller", module("octrain_api", "controller"), self._server_environment()
            )
            self.state.api.url = self.url
            self.state.save(self.data_dir)
        except BaseException:
            self.stop()
            raise

    def _start_workers(self, names: Collection[str] | None = None) -> None:
        for name in self.worker_names:
            if f"worker-{name}" not in self._processes and (names is None or name in names):
                self.start_worker(name)

    def start_worker(
        self,
        name: str,
        *,
        api_url: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the worker of a node (one that ``workers`` did not name, too).

        ``api_url`` is the API as this node reaches it, when that is not ``url``. ``environment``
        is added to this worker's alone.
        """
        command = module(
            "octrain_worker",
            *("run", "--name", name, "--api", api_url or self.url),
            *("--data-dir", str(self.worker_data_dir(name))),
        )
        self._start_process(
            f"worker-{name}", command, self._worker_environment(name) | dict(environment or {})
        )

    def restart(self, name: str) -> None:
        """Start a process again that has ended (at the same port, with the same data)."""
        if name == "postgres" and self.postgres is not None:
            self.postgres.start()
            self._processes[name] = self.postgres.process
        elif name == "valkey" and self.valkey is not None:
            self.valkey.start()
            self._processes[name] = self.valkey.process
        else:
            self._processes[name].start()

    def _take_folder(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        self.logs.mkdir(exist_ok=True)
        self._lock = lock_folder(self.data_dir)
        try:
            self.state = StackState.load(self.data_dir)
        except (OSError, ValueError) as error:
            self._release_folder()
            raise LocalStackError(str(error)) from None

    def _release_folder(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start_databases(self) -> None:
        account = choose_account()
        if not self._redis_url:
            kept = self.state.valkey
            self.valkey = ValkeyServer(self.data_dir, self.logs / "valkey.log", account=account)
            self.valkey.port = kept.port
            kept.password = self.valkey.password = kept.password or self.valkey.password
            self.valkey.start()
            self._processes["valkey"] = self.valkey.process
            kept.port = self.valkey.port
        if not self._database_url:
            kept = self.state.postgres
            self.postgres = PostgresServer(
                self.data_dir, self.logs / "postgres.log", account=account
            )
            self.postgres.port = kept.port
            kept.password = self.postgres.password = kept.password or self.postgres.password
            self.state.save(self.data_dir)  # the password, before a cluster is made with it
            self.postgres.start()
            self._processes["postgres"] = self.postgres.process
            kept.port = self.postgres.port
        self.state.save(self.data_dir)

    def _begin_first_key(self) -> subprocess.Popen[bytes]:
        return begin_first_key(self._server_environment(), self.logs / "migrate.log")

    def _migrate(self) -> None:
        migrate(self._server_environment(), self.logs / "migrate.log")

    def _keys_are_known(self) -> bool:
        """Whether our keys are in this database (which therefore has had a schema)."""
        api = self.state.api
        return bool(api.key and api.node_keys and api.database == self._fingerprint())

    def _fingerprint(self) -> str:
        named = self._database_url or str(self.data_dir)
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def _node_key_of(self, name: str) -> str:
        """The key of this node; a node has one of its own, made when it first starts here."""
        api = self.state.api
        if name not in api.node_keys:
            with Client(self.url, self.api_key) as client:
                api.node_keys[name] = client.create_key(
                    f"node {name}", "local", ["node"], node=name
                )
            api.database = self._fingerprint()
            self.state.save(self.data_dir)
        return api.node_keys[name]

    def _settle_port(self) -> None:
        """A port that is free. One that a predecessor holds for a moment yet is waited for."""
        if self.port == 0:
            last = self.state.api.url.rpartition(":")[2]
            self.port = int(last) if last.isdigit() and is_free(int(last)) else free_port()
            return
        deadline = time.monotonic() + 2.0
        while not is_free(self.port, self.host):
            if time.monotonic() > deadline:
                raise LocalStackError(
                    f"Port {self.port} of {self.host} is taken by another program. "
                    "Give a free one with --port."
                )
            time.sleep(0.05)

    def _api_command(self) -> list[str]:
        return module("octrain_api", "serve", "--host", self.host, "--port", str(self.port))

    def _server_environment(self) -> dict[str, str]:
        return base_environment(self.data_dir, self._shared_settings()) | {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
        }

    def _worker_environment(self, name: str) -> dict[str, str]:
        return base_environment(self.data_dir, self._shared_settings()) | {
            "REDIS_URL": self.redis_url,
            "OCTRAIN_API_URL": self.url,
            "OCTRAIN_NODE_KEY": self._node_key_of(name),
            # The databases share the cores: a trainer's threads that spin while they wait for one
            # another make a step take a hundred times as long.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }

    def _shared_settings(self) -> dict[str, str]:
        return {
            "OCTRAIN_ARTIFACT_URL": self.artifact_url,
            "OCTRAIN_ROOTS": os.pathsep.join(map(str, self.roots)),
            **self._environment,
        }

    def _start_process(self, name: str, argv: list[str], environment: dict[str, str]) -> None:
        log = self.logs / f"{name}.log"
        rotate(log)
        self._processes[name] = ManagedProcess(name, argv, log, env=environment, cwd=self.data_dir)
        self._processes[name].start()

    def _await_api(self) -> None:
        api = self._processes["api"]
        deadline = time.monotonic() + START_SECONDS
        migrated = False
        while not self.is_ready():
            if api.returncode == _SCHEMA_MISMATCH and not migrated:
                self._migrate()  # a newer release than the one that last ran here
                api.start()
                migrated = True
            elif not api.running:
                raise LocalStackError(f"The API did not start:\n{api.log_tail()}")
            if time.monotonic() > deadline:
                raise LocalStackError(f"The API does not become ready:\n{api.log_tail()}")
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether GET /readyz answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait_for_nodes(self, seconds: float = START_SECONDS) -> bool:
        """Wait until every worker has registered its node; whether all have in time."""
        deadline = time.monotonic() + seconds
        while not self.nodes_are_ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def nodes_are_ready(self) -> bool:
        """Whether every worker's node is live; not if the API does not answer at once."""
        try:
            with Client(self.url, self.api_key, timeout=5.0, retries=0) as client:
                return set(self.worker_names) <= {n.name for n in client.nodes() if n.live}
        except OctrainError:
            return False

    # Run

    def run(self, stop: threading.Event, tick_seconds: float = 0.2) -> None:
        """Watch over the processes until ``stop`` is set: start again what died (with growing
        pauses), keep the logs small, say once when every node is there. Main thread only.
        """
        self._restarts = Restarts(dict.fromkeys(self._processes, time.monotonic()))
        rotated = time.monotonic()
        nodes_ready = False
        while not stop.wait(tick_seconds):
            now = time.monotonic()
            if not nodes_ready and self.nodes_are_ready():
                nodes_ready = True
                self._on_event(f"Nodes ready: {', '.join(self.worker_names)}")
            for name in list(self._processes):
                self._watch(name, now)
            self._tell_of_returned(now)
            if now - rotated > 5.0:
                rotated = now
                for process in self._processes.values():
                    rotate(process.log)

    def _watch(self, name: str, now: float) -> None:
        process = self._processes[name]
        decision = self._restarts.look(name, process.running, now)
        if decision.pause is not None:
            self._on_event(
                f"{name} ended ({_ending(process.returncode)}); starting it again in "
                f"{decision.pause:g} s. Its log: {process.log}"
            )
        elif decision.start:
            try:
                self.restart(name)
                self._returning[name] = now
            except LocalStackError as error:
                self._on_event(f"{name} could not be started: {error}")

    def _tell_of_returned(self, now: float) -> None:
        """Say of each process that was started again that it is there: the API once it answers."""
        for name, since in list(self._returning.items()):
            if not self._processes[name].running:
                del self._returning[name]
            elif self.is_ready() if name == "api" else now - since > _STAYS_SECONDS:
                del self._returning[name]
                at = f" at {self.url}" if name == "api" else ""
                self._on_event(f"{name} is up again{at}")

    # Stop

    def stop(self) -> None:
        """Stop everything within 10 s: workers first, so that jobs checkpoint and go back to the
        queue; then the API and the controller; then Valkey and Postgres.
        """
        began = time.monotonic()
        workers = [name for name in self._processes if name.startswith("worker-")]
        self._stop_together(workers, began + WORKERS_STOPPED_AT)
        others = [p.pid for p in self._processes.values() if p.running and p.pid is not None]
        if ended := end_leftovers(self.data_dir, others):
            self._on_event(f"ended {len(ended)} processes that the workers had left")
        self._stop_together(["api", "controller"], began + SERVERS_STOPPED_AT)
        self._stop_together(["valkey", "postgres"], began + DATABASES_STOPPED_AT)
        self._release_folder()

    def _stop_together(self, names: Sequence[str], deadline: float) -> None:
        stopping = [self._processes[name] for name in names if name in self._processes]
        for process in stopping:
            process.request_stop()
        for process in stopping:
            if not process.wait(deadline):
                self._on_event(f"{process.name} did not stop in time and was killed")
                process.kill()

    def __enter__(self) -> LocalStack:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {-status}"
    return f"exit status {status}"
