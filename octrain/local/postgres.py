"""A real Postgres server as a child of ours.

It listens on the loopback address only, on a port of its own, asks for a password (SCRAM), and
keeps ``fsync`` on. It shuts down cleanly when we die, however we die.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octrain.local.accounts import ServerAccount, choose_account
from octrain.local.binaries import PostgresBinaries, find_postgres
from octrain.local.errors import LocalStackError
from octrain.local.ports import LOOPBACK, free_port, is_free
from octrain.local.processes import (
    POLL_SECONDS,
    ManagedProcess,
    await_absence,
    servers_in,
    spawn,
    tail,
)

USER = "octrain"
DATABASE = "octrain"
START_SECONDS = 60.0  # a crash recovery may replay a long log
_TAKEN_PORT = ("Address already in use", "could not create any TCP/IP sockets")
_PREDECESSOR = ("pre-existing shared memory block", "lock file")


@dataclass
class PostgresServer:
    """One server on one data folder.

    ``port`` 0 means any; the one in use stands here once it has started. ``password`` belongs to
    the data folder: keep it, and hand it in at the next start. ``settings`` are server settings
    (``{"max_connections": "50"}``) added to the command line.
    """

    data_dir: Path
    log: Path
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    port: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    account: ServerAccount = field(default_factory=choose_account)
    _binaries: PostgresBinaries | None = None
    _process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise LocalStackError("Postgres has not been started.")
        return self._process

    def url(self, database: str = DATABASE) -> str:
        """postgresql://user:password@127.0.0.1:port/database"""
        return f"postgresql://{USER}:{self.password}@{LOOPBACK}:{self.port}/{database}"

    def start(self) -> None:
        """Start it (making the database cluster at the first start) and return when it accepts
        connections. Where the folder has another password than ``password``, for what kept it was
        lost, it is given this one. Errors: LocalStackError with the end of its log.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Where it still works, before the account may ask for another place.
        self._await_predecessor((self.data_dir / "postgres").resolve())
        folder = self.account.data_folder(self.data_dir, "postgres")
        fresh = not (folder / "PG_VERSION").exists()
        self._binaries = self.account.reachable_postgres(find_postgres(_cluster_major(folder)))
        database_made = self.data_dir / ".database-made"
        if fresh:
            database_made.unlink(missing_ok=True)
            self._initialise(folder)
        self._start_server(folder)
        if not fresh and not self._takes_password():
            self.stop()
            self._change_password(folder)
            self._start_server(folder)
        if not database_made.exists():
            self.create_database(DATABASE)
            database_made.touch()

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Fast shutdown: sessions are cut, data are written out; killed after the grace."""
        if self._process is not None:
            self._process.stop(grace_seconds)

    def create_database(self, name: str) -> str:
        """Make an empty database unless it exists; its URL. Needs psycopg."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            row = connection.execute(
                "select 1 from pg_database where datname = %s", (name,)
            ).fetchone()
            if row is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        return self.url(name)

    def _initialise(self, folder: Path) -> None:
        assert self._binaries is not None
        # An interrupted initdb leaves a folder without PG_VERSION that it then refuses.
        _empty(folder)
        with self._private_file(folder, self.password) as password_file:
            argv = [
                *(str(self._binaries.initdb), "-D", str(folder), "-U", USER),
                *("-A", "scram-sha-256", "--pwfile", str(password_file)),
                *("-E", "UTF8", "--locale=C"),
            ]
            status = self._run(argv, folder)
        if status != 0:
            raise LocalStackError(
                f"Postgres could not make its data folder {folder}:\n{tail(self.log)}"
            )

    def _takes_password(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=10).close()
        except psycopg.OperationalError as error:
            # Whatever else is wrong is told by whoever connects next.
            return "password authentication failed" not in str(error)
        return True

    def _change_password(self, folder: Path) -> None:
        """In Postgres's single-user mode, in which whoever owns the folder is not asked for one."""
        assert self._binaries is not None
        settings = {
            "password_encryption": "scram-sha-256",
            "exit_on_error": "on",
            # The statement holds the password.
            "log_min_error_statement": "panic",
        }
        argv = [str(self._binaries.postgres), "--single", "-D", str(folder)]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        # A password is urlsafe: nothing in it has to be quoted.
        statement = f"ALTER ROLE {USER} PASSWORD '{self.password}'"
        with self._private_file(folder, statement) as statements, statements.open("rb") as file:
            status = self._run([*argv, "postgres"], folder, file.fileno())
        if status != 0:
            raise LocalStackError(
                f"The password of the Postgres in {folder} could not be changed:\n{tail(self.log)}"
            )

    @contextlib.contextmanager
    def _private_file(self, folder: Path, text: str) -> Iterator[Path]:
        """A file with a line for Postgres's own programs alone, beside its folder; removed."""
        path = folder.with_name("postgres.password")
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            self.account.own(path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _run(self, argv: Sequence[str], folder: Path, stdin: int = subprocess.DEVNULL) -> int:
        """The exit status of one of Postgres's programs; -1 where it takes too long."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            child = spawn(
                argv,
                output=log.fileno(),
                cwd=folder,
                stdin=stdin,
                run_as=self.account.run_as,
                death_signal=signal.SIGTERM,
            )
            try:
                return child.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                return -1

    def _await_predecessor(self, folder: Path) -> None:
        """Let a server of a killed launcher finish; forget a lock file whose owner is none.

        Postgres itself refuses to start over a lock file that names a zombie or another program.
        """

        def running() -> list[int]:
            return servers_in(folder, "postgres")

        if left := await_absence(running, START_SECONDS):
            raise LocalStackError(
                f"Another Postgres (process {left[0]}) runs on {folder}. Stop it, or give another "
                "--data-dir."
            )
        # No process works in the folder, so nobody is attached to its shared memory either.
        (folder / "postmaster.pid").unlink(missing_ok=True)

    def _start_server(self, folder: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.port == 0 or not is_free(self.port):
                self.port = free_port()
            before = self.log.stat().st_size if self.log.exists() else 0
            process = self._process = ManagedProcess(
                "postgres",
                self._command(folder),
                self.log,
                cwd=folder,
                run_as=self.account.run_as,
                stop_signal=signal.SIGINT,
            )
            process.start()
            if self._await_ready(process, folder, deadline):
                return
            said = _text_after(self.log, before)
            if time.monotonic() < deadline and any(text in said for text in _TAKEN_PORT):
                self.port = 0
            elif time.monotonic() < deadline and any(text in said for text in _PREDECESSOR):
                time.sleep(10 * POLL_SECONDS)
            else:
                process.stop(5.0)
                raise LocalStackError(f"Postgres did not start:\n{process.log_tail()}")

    def _command(self, folder: Path) -> list[str]:
        assert self._binaries is not None
        argv = [str(self._binaries.postgres), "-D", str(folder), "-p", str(self.port)]
        settings = {
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "password_encryption": "scram-sha-256",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self.settings,
        }
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        return argv

    def _await_ready(self, process: ManagedProcess, folder: Path, deadline: float) -> bool:
        """Ready when the lock file names our child and its status line says so."""
        lock = folder / "postmaster.pid"
        while process.running and time.monotonic() < deadline:
            try:
                lines = lock.read_text(errors="replace").splitlines()
            except OSError:
                lines = []
            if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
                return True
            time.sleep(POLL_SECONDS)
        return False


def _cluster_major(folder: Path) -> int | None:
    """The major version that made the data folder; None for a new one."""
    try:
        return int((folder / "PG_VERSION").read_text().strip())
    except FileNotFoundError:
        return None
    except ValueError:
        raise LocalStackError(f"{folder / 'PG_VERSION'} is damaged: it holds no version.") from None


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _text_after(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(65536).decode(errors="replace")
