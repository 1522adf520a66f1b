"""The service of a chaos run: two APIs, two controllers, nodes behind networks that can be cut.

All of it are the product's own processes, started by its own launcher, around a Postgres that
keeps fsync on. Only durations are shortened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from octrain.local.commands import module
from octrain.local.ports import LOOPBACK, free_port
from octrain.local.processes import ManagedProcess, descendants, is_alive, process_state
from octrain.local.stack import LocalStack
from tests.chaos.proxy import CuttableProxy
from tests.small_disk import NoSmallDisk, small_disk

__all__ = ["LEASE_SECONDS", "SETTINGS", "ChaosStack"]

# The shortest lease that a job may have: it stands for the hours of a real one.
LEASE_SECONDS = 30
SETTINGS: dict[str, str] = {
    "OCTRAIN_CONTROLLER_TICK": "0.5",
    "OCTRAIN_CONTROLLER_HEARTBEAT_INTERVAL": "1",
    "OCTRAIN_CONTROLLER_HEARTBEAT_TTL": "8",
    "OCTRAIN_CONTROLLER_DOWNTIME_TOLERANCE": "5",
    "OCTRAIN_CONTROLLER_LEASE_MARGIN": "8",
    "OCTRAIN_CONTROLLER_FORCED_LEASE": "5",
    "OCTRAIN_CONTROLLER_RESEND_AFTER": "3",
    # One fault after another hits every node here: none of them is the node's own.
    "OCTRAIN_SCHEDULER_FAULT_LIMIT": "0",
    "OCTRAIN_WORKER_CPU_SLOTS": "2",
    "OCTRAIN_WORKER_SPARE_DELAY_SECONDS": "1",
    "OCTRAIN_SUPERVISOR_CLAIM_PATIENCE_SECONDS": "20",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
SMALL_DISK_BYTES = 64 << 20
APIS = ("api", "api-2")
CONTROLLERS = ("controller", "controller-2")


class ChaosStack(LocalStack):
    """A stack whose nodes are ``nodes``; the last one's disk is small, where one may be mounted."""

    def __init__(
        self, data_dir: Path, *, roots: Sequence[Path], nodes: Sequence[str], **settings: str
    ) -> None:
        trainer = Path(__file__).with_name("trainer.py")
        super().__init__(
            data_dir,
            roots=roots,
            workers=(),
            environment={
                **SETTINGS,
                "OCTRAIN_TRAINER_COMMAND": f"{sys.executable} {trainer}",
                **settings,
            },
        )
        self.nodes = list(nodes)
        self.proxies: dict[str, CuttableProxy] = {}
        self.second_port = 0
        self.small_disk: Path | None = None
        self._mounts = contextlib.ExitStack()

    @property
    def urls(self) -> list[str]:
        return [f"http://{LOOPBACK}:{port}" for port in (self.port, self.second_port)]

    def start(self) -> None:
        super().start()
        try:
            self.second_port = free_port()
            serve = module(
                "octrain_api", "serve", "--host", LOOPBACK, "--port", str(self.second_port)
            )
            self._start_process(APIS[1], serve, self._server_environment())
            controller = module("octrain_api", "controller")
            self._start_process(CONTROLLERS[1], controller, self._server_environment())
            self._mount_small_disk(self.nodes[-1])
            for node in self.nodes:
                self.proxies[node] = CuttableProxy([self.port, self.second_port])
                self.start_worker(node, api_url=self.proxies[node].url)
            self.worker_names = self.nodes
        except BaseException:
            self.stop()
            raise

    def _mount_small_disk(self, node: str) -> None:
        try:
            folder = self._mounts.enter_context(
                small_disk(self.data_dir / "small-disk", SMALL_DISK_BYTES)
            )
        except NoSmallDisk:
            return
        self.small_disk = folder
        place = self.worker_data_dir(node)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder)

    def server_environment(self) -> Mapping[str, str]:
        """The environment of API and controller: the database and the broker are named there."""
        return self._server_environment()

    def kill(self, name: str) -> int:
        """SIGKILL of one of our processes; its id."""
        process = self.process(name)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(float("inf"))
        return process.pid

    def is_running(self, name: str) -> bool:
        return self.process(name).running

    def pids(self) -> list[int]:
        """Our own processes that run, with what they have started."""
        own = [p.pid for p in self._processes.values() if p.running and p.pid is not None]
        return [pid for each in own for pid in (each, *descendants(each))]

    def ended(self) -> list[str]:
        """The processes of ours that do not run."""
        return [name for name, process in self._processes.items() if not process.running]

    def reap(self) -> None:
        """Take the status of orphans that became our children, so that none stays a zombie."""
        ours = {process.pid for process in self._processes.values()}
        me = os.getpid()
        for task in Path(f"/proc/{me}/task").iterdir():
            with contextlib.suppress(OSError):
                for word in (task / "children").read_text().split():
                    if int(word) not in ours and process_state(int(word)) == "Z":
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(int(word), os.WNOHANG)

    def stop(self) -> None:
        try:
            self._stop_processes()
        finally:
            self.small_disk = None
            self._mounts.close()

    def _stop_processes(self) -> None:
        for name in list(self._processes):
            process: ManagedProcess = self._processes[name]
            if process.pid is not None and is_alive(process.pid):
                os.kill(process.pid, signal.SIGCONT)
        extras = [name for name in (APIS[1], CONTROLLERS[1]) if name in self._processes]
        for name in extras:
            self._processes[name].request_stop()
        super().stop()
        for name in extras:
            self._processes[name].stop(2.0)
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
