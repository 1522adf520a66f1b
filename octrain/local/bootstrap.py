"""What comes before the servers: the folder to oneself, the schema, the first key."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from octrain.local.commands import module
from octrain.local.errors import DataFolderInUse, LocalStackError
from octrain.local.processes import ManagedProcess, spawn, tail

MIGRATION_SECONDS = 600.0
USER_SCOPES = "jobs:read,jobs:write,admin"


def lock_folder(data_dir: Path) -> int:
    """Take the folder; the descriptor whose closing (by our death, too) gives it back.

    Errors: DataFolderInUse, naming the process that has it.
    """
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise DataFolderInUse(
            f"A local stack already runs on {data_dir} (process {holder or 'unknown'}). "
            "Use that one, stop it with Ctrl-C or SIGTERM, or give another --data-dir."
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def migrate(environment: Mapping[str, str], log: Path) -> None:
    """Bring the database to this version's schema. Errors: LocalStackError."""
    process = ManagedProcess("migrate", module("octrain_api", "migrate"), log, env=environment)
    process.start()
    if not process.wait(time.monotonic() + MIGRATION_SECONDS):
        process.stop(1.0)
    if process.returncode != 0:
        raise LocalStackError(f"The database could not be migrated:\n{process.log_tail()}")


def begin_first_key(environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Begins to bring the database to this version's schema and to make a key in it, for the
    person at this machine; ``finish_first_key`` has the key. Errors: LocalStackError.
    """
    arguments = ("create-key", "--migrate", "--name", "local", "--owner", "local")
    with log.open("ab") as file:
        return spawn(
            module("octrain_api", *arguments, "--scopes", USER_SCOPES),
            output=file.fileno(),
            answer=subprocess.PIPE,
            env=environment,
        )


def finish_first_key(process: subprocess.Popen[bytes], log: Path) -> str:
    """The key that ``begin_first_key`` makes. Errors: LocalStackError."""
    try:
        output, _ = process.communicate(timeout=MIGRATION_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    with contextlib.suppress(ValueError, KeyError, IndexError):
        if process.returncode == 0:
            return str(json.loads(output.decode().strip().splitlines()[-1])["key"])
    raise LocalStackError(
        f"The database could not be migrated, or the first API key not be made:\n{tail(log)}"
    )
