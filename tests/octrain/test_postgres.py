"""The Postgres driver, with real servers that are really killed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from octrain.local import binaries
from octrain.local.accounts import ServerAccount, nobody_account
from octrain.local.errors import BinariesMissing, LocalStackError
from octrain.local.postgres import PostgresServer
from octrain.local.processes import RunAs, is_alive, servers_in, user_namespaces_work

REPOSITORY = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

Postgres = Callable[..., PostgresServer]


@pytest.fixture
def make(tmp_path: Path) -> Postgres:
    def build(folder: Path = tmp_path, **options: object) -> PostgresServer:
        return PostgresServer(folder, folder / "postgres.log", **options)  # type: ignore[arg-type]

    return build


def query(server: PostgresServer, statement: str) -> object:
    with psycopg.connect(server.url()) as connection:
        row = connection.execute(statement).fetchone()
    return row[0] if row else None


def test_data_and_port_survive_a_restart(make: Postgres) -> None:
    server = make()
    server.start()
    try:
        with psycopg.connect(server.url()) as connection:
            connection.execute("create table kept as select 7 as value")
        port = server.port
        server.stop()
        again = make(password=server.password, port=port)
        again.start()
        server = again
        assert (again.port, query(again, "select value from kept")) == (port, 7)
    finally:
        server.stop()


def test_it_is_durable_private_and_asks_for_the_password(make: Postgres, tmp_path: Path) -> None:
    server = make()
    server.start()
    try:
        assert query(server, "show fsync") == "on"
        assert query(server, "show listen_addresses") == "127.0.0.1"
        assert query(server, "show unix_socket_directories") == ""
        stored = query(server, "select rolpassword from pg_authid where rolname = 'octrain'")
        assert str(stored).startswith("SCRAM-SHA-256$")
        wrong = server.url().replace(server.password, "wrong")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)
        command = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert server.password not in command
        assert (tmp_path / "postgres").stat().st_mode & 0o777 == 0o700
        assert not list(tmp_path.glob("*.password"))
    finally:
        server.stop()


def test_a_password_that_was_lost_is_replaced(make: Postgres, tmp_path: Path) -> None:
    """Whoever has the folder has the data: losing what kept the password loses none of them."""
    server = make()
    server.start()
    with psycopg.connect(server.url()) as connection:
        connection.execute("create table kept as select 5 as value")
    server.stop()
    again = make()
    assert again.password != server.password
    again.start()
    try:
        assert query(again, "select value from kept") == 5
        lost = again.url().replace(again.password, server.password)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(lost)
        assert again.password not in again.log.read_text()
        assert not list(tmp_path.glob("*.password"))
    finally:
        again.stop()


def test_a_taken_port_is_exchanged_for_another(make: Postgres) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        server = make(port=taken)
        server.start()
        try:
            assert server.port != taken
            assert query(server, "select 1") == 1
        finally:
            server.stop()


def test_sigkill_of_the_server_loses_nothing_and_its_zombie_does_not_block(make: Postgres) -> None:
    server = make()
    server.start()
    with psycopg.connect(server.url()) as connection:
        connection.execute("create table kept as select 11 as value")
    pid = server.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # Not reaped yet: exactly what a PID 1 that does not reap leaves for ever.
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    again = make(password=server.password)
    again.start()
    try:
        assert Path(f"/proc/{pid}").exists(), "the zombie was meant to be still there"
        assert query(again, "select value from kept") == 11
    finally:
        again.stop()
        server.process.wait(time.monotonic() + 5)


def test_a_lock_file_that_names_another_program_is_forgotten(
    make: Postgres, tmp_path: Path
) -> None:
    server = make()
    server.start()
    server.stop()
    lock = tmp_path / "postgres" / "postmaster.pid"
    other = subprocess.Popen(["sleep", "60"])
    try:
        lock.write_text(f"{other.pid}\n{tmp_path / 'postgres'}\n1\n1\n\n127.0.0.1\n1\nready\n")
        server.account.own(lock)
        server.start()
        assert query(server, "select 1") == 1
    finally:
        server.stop()
        other.kill()
        other.wait()


LAUNCHER = """
import os, sys
import psycopg  # before the change of user: the interpreter itself may lie below a 0700 folder
from pathlib import Path
from octrain.local.servers import LocalServers
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
servers = LocalServers(Path(sys.argv[1]))
servers.start()
postgres, valkey = servers.postgres, servers.valkey
print(postgres.process.pid, valkey.process.pid, postgres.password, flush=True)
sys.stdin.read()
servers.stop()
"""


def launch(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, int, str]:
    child = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert child.stdout is not None
    line = child.stdout.readline().split()
    assert len(line) == 3, "the launcher failed; its reason is on stderr"
    return child, int(line[0]), int(line[1]), line[2]


def await_end(*pids: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive after {seconds} s: {pids}"
        time.sleep(0.01)


def test_sigkill_of_the_launcher_leaves_nothing_and_a_clean_shutdown(
    make: Postgres, tmp_path: Path
) -> None:
    child, postgres, valkey, password = launch(tmp_path)
    child.kill()
    child.communicate()
    # At once, while the old server may still be shutting down.
    server = make(password=password)
    server.start()
    try:
        await_end(postgres, valkey)
        assert query(server, "select 1") == 1
        log = (tmp_path / "logs" / "postgres.log").read_text()
        assert "database system is shut down" in log
        assert "was interrupted" not in (tmp_path / "postgres.log").read_text()
    finally:
        server.stop()
    assert servers_in((tmp_path / "postgres").resolve(), "postgres") == []


@as_root
@pytest.mark.parametrize("uid", [pwd.getpwnam("daemon").pw_uid, 54321], ids=["known", "nameless"])
def test_it_runs_for_an_unprivileged_user(uid: int) -> None:
    if uid == 54321 and not user_namespaces_work():
        pytest.skip("initdb needs a user namespace to run for a user without a name")
    # Not below pytest's folder: that one is 0700 and root's, and a user keeps data where they can.
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o700)
        os.chown(home, uid, uid)
        child, postgres, valkey, _ = launch(Path(home), str(uid))
        try:
            for pid in (postgres, valkey):
                assert Path(f"/proc/{pid}").stat().st_uid == uid
        finally:
            child.communicate()
        await_end(postgres, valkey)
        assert child.returncode == 0


@as_root
def test_root_without_user_namespaces_uses_nobody(make: Postgres, tmp_path: Path) -> None:
    """Data and programs then leave the 0700 folder; its mode stays."""
    assert tmp_path.parent.parent.stat().st_mode & 0o077 == 0, "pytest's folder is 0700"
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o711)
        account = nobody_account(Path(shared))
        server = make(account=account)
        server.start()
        try:
            assert query(server, "select 1") == 1
            with psycopg.connect(server.url()) as connection:
                connection.execute("create table kept as select 3 as value")
            assert Path(f"/proc/{server.process.pid}").stat().st_uid == account.run_as.uid
            assert Path(os.readlink(f"/proc/{server.process.pid}/exe")).is_relative_to(shared)
            assert (tmp_path / "postgres").is_symlink()
        finally:
            server.stop()
        assert tmp_path.parent.parent.stat().st_mode & 0o077 == 0
        # The same data, now through the other way.
        again = make(password=server.password, account=ServerAccount(server_in_namespace()))
        again.start()
        try:
            assert query(again, "select value from kept") == 3
        finally:
            again.stop()


def server_in_namespace() -> RunAs:
    if not user_namespaces_work():
        pytest.skip("user namespaces are refused here")
    return RunAs(user_namespace=True)


def test_fork_hooks_of_the_program_around_us_take_no_namespace_away(tmp_path: Path) -> None:
    """A tracing library starts a thread in every forked child; the kernel lets only a process of
    one thread enter a namespace. The server still ends with its launcher."""
    server_in_namespace()
    code = f"""
import os, signal, sys, threading, time
os.register_at_fork(
    after_in_child=lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
)
from octrain.local.processes import RunAs, spawn, user_namespaces_work
assert user_namespaces_work()
with open({str(tmp_path / "log")!r}, "w") as log:
    child = spawn(["/bin/sleep", "60"], output=log.fileno(), run_as=RunAs(user_namespace=True))
while os.path.basename(os.readlink(f"/proc/{{child.pid}}/exe")) != "sleep":
    assert child.poll() is None
    time.sleep(0.01)
print(child.pid, os.readlink(f"/proc/{{child.pid}}/ns/user"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, namespace = done.stdout.split()
    assert namespace != os.readlink("/proc/self/ns/user")
    deadline = time.monotonic() + 10
    while is_alive(int(pid)):
        assert time.monotonic() < deadline, "it outlives its launcher"
        time.sleep(0.02)


def test_binaries_below_a_private_folder_run(
    make: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below a 0700 folder."""
    found = binaries.find_postgres()
    if not found.tree:
        pytest.skip("needs the wheel's binaries")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    package = found.tree[0].parent
    for folder in found.tree:
        shutil.copytree(folder, private / folder.relative_to(package.parent), symlinks=True)
    copy = binaries.PostgresBinaries(
        private / found.folder.relative_to(package.parent),
        found.major,
        tuple(private / folder.relative_to(package.parent) for folder in found.tree),
    )
    monkeypatch.setattr("octrain.local.postgres.find_postgres", lambda major=None: copy)
    server = make(tmp_path / "data")
    server.start()
    try:
        assert os.readlink(f"/proc/{server.process.pid}/exe").startswith(str(private))
        assert query(server, "select 1") == 1
    finally:
        server.stop()


def test_binaries_of_the_system_are_the_second_choice(
    make: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binaries, "_POSTGRES_WHEELS", ())
    try:
        found = binaries.find_postgres()
    except BinariesMissing:
        pytest.skip("no Postgres is installed on this system")
    server = make()
    server.start()
    try:
        version = str(query(server, "show server_version"))
        assert version.split(".")[0] == str(found.major)
    finally:
        server.stop()
    # Its folder is not handed to another major version.
    (tmp_path / "postgres" / "PG_VERSION").write_text("9999\n")
    with pytest.raises(BinariesMissing, match="made by Postgres 9999"):
        make(password=server.password).start()


def test_starting_from_another_thread_is_refused(make: Postgres) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(LocalStackError, match="main thread"),
    ):
        pool.submit(make().start).result()
