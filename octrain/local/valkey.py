"""A real Valkey server as a child of ours: loopback only, with a password, append-only file on."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from octrain.local.accounts import ServerAccount, choose_account
from octrain.local.binaries import find_valkey
from octrain.local.errors import LocalStackError
from octrain.local.ports import LOOPBACK, free_port, is_free
from octrain.local.processes import POLL_SECONDS, ManagedProcess, await_absence, servers_in

START_SECONDS = 60.0  # a long append-only file is read at the start
_CONFIGURATION = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
daemonize no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


@dataclass
class ValkeyServer:
    """One server on one data folder; ``port`` 0 means any."""

    data_dir: Path
    log: Path
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    port: int = 0
    account: ServerAccount = field(default_factory=choose_account)
    _process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise LocalStackError("Valkey has not been started.")
        return self._process

    def url(self, database: int = 0) -> str:
        """redis://:password@127.0.0.1:port/database"""
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/{database}"

    def start(self) -> None:
        """Start it and return when it answers. Errors: LocalStackError with the end of its log."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self.account.data_folder(self.data_dir, "valkey")
        program = self.account.reachable_program(find_valkey())

        def running() -> list[int]:
            return servers_in(folder, program.resolve().name)

        if left := await_absence(running, 10.0):
            raise LocalStackError(
                f"Another Valkey (process {left[0]}) runs on {folder}. Stop it, or give another "
                "--data-dir."
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.port == 0 or not is_free(self.port):
                self.port = free_port()
            configuration = self._write_configuration(folder)
            process = self._process = ManagedProcess(
                "valkey",
                [str(program), str(configuration)],
                self.log,
                cwd=folder,
                run_as=self.account.run_as,
            )
            process.start()
            if self._await_ready(process, deadline):
                return
            taken = "Address already in use" in process.log_tail()
            if time.monotonic() > deadline or not taken:
                process.stop(5.0)
                raise LocalStackError(f"Valkey did not start:\n{process.log_tail()}")
            self.port = 0

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Orderly shutdown (the append-only file is synced); killed after the grace."""
        if self._process is not None:
            self._process.stop(grace_seconds)

    def _write_configuration(self, folder: Path) -> Path:
        """A file rather than arguments: every user of the machine can read a command line."""
        path = folder / "valkey.conf"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(
                _CONFIGURATION.format(
                    host=LOOPBACK,
                    port=self.port,
                    password=self.password,
                    folder='"{}"'.format(str(folder).replace("\\", "\\\\").replace('"', '\\"')),
                )
            )
        self.account.own(path)
        return path

    def _await_ready(self, process: ManagedProcess, deadline: float) -> bool:
        while process.running and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self._ping():
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _ping(self) -> bool:
        """Whether the server takes our password and has read its file (else it says -LOADING)."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.settimeout(2.0)
            connection.connect((LOOPBACK, self.port))
            connection.sendall(f"AUTH {self.password}\r\nPING\r\nQUIT\r\n".encode())
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        return answer.startswith(b"+OK\r\n+PONG")
