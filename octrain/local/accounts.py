"""Which account the database servers run under, and where their files then lie.

Postgres refuses to run as root. A normal user runs the servers as themselves. Root has two ways:

1. An empty user namespace: inside it the server is nobody in particular and holds no capability,
   while the files stay root's. Works below folders of mode 0700 and copies nothing.
2. Where namespaces are refused (a container's seccomp filter): the user ``nobody``. It can reach
   neither a virtual environment nor a data folder below a 0700 folder, and we never loosen the
   mode of a folder that is not ours; so programs and data move below ``/var/lib/octrain``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from octrain.local.binaries import PostgresBinaries
from octrain.local.errors import LocalStackError
from octrain.local.processes import RunAs, user_namespaces_work

SHARED_FOLDER = Path("/var/lib/octrain")


@dataclass(frozen=True)
class ServerAccount:
    """The account of the servers. ``shared`` is set for way 2: where their files must lie."""

    run_as: RunAs
    shared: Path | None = None

    def data_folder(self, data_dir: Path, server: str) -> Path:
        """The (existing) folder, mode 0700 and owned by the account, for a server's data."""
        folder = data_dir / server
        if self.shared is None:
            _make_folder(folder, 0o700)  # a link that way 2 left is followed, and then owned
        else:
            folder = self._moved(data_dir, folder)
        self.own(folder)
        return folder.resolve()

    def _moved(self, data_dir: Path, folder: Path) -> Path:
        """``folder`` below the shared folder, with what it held, and a link at its old place."""
        assert self.shared is not None
        _make_folder(self.shared, 0o711)
        digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]
        base = self.shared / digest
        _make_folder(base, 0o711)
        target = base / folder.name
        if not folder.is_symlink():
            if folder.exists() and not target.exists():
                shutil.move(folder, target)
            _make_folder(target, 0o700)
            folder.symlink_to(target)
        _make_folder(target, 0o700)
        return target

    def own(self, path: Path) -> None:
        """Give a file, or a folder with all in it, to the account (root only)."""
        if os.geteuid() != 0:
            return
        uid = self.run_as.uid if self.run_as.uid is not None else 0
        gid = self.run_as.gid if self.run_as.gid is not None else 0
        if path.stat().st_uid == uid:
            return
        for folder, _, files in os.walk(path):
            for name in [folder, *(os.path.join(folder, file) for file in files)]:
                os.chown(name, uid, gid, follow_symlinks=False)
        os.chown(path, uid, gid)

    def reachable_postgres(self, binaries: PostgresBinaries) -> PostgresBinaries:
        """The same programs where the account can run them (a copy only in way 2)."""
        if self.shared is None or not binaries.tree:
            return binaries
        package = binaries.tree[0].parent
        target = self._program_folder(binaries.postgres)
        copied = target / package.name / binaries.tree[0].name
        if not target.exists():
            with _becomes(target) as draft:
                shutil.copytree(
                    binaries.tree[0], draft / package.name / binaries.tree[0].name, symlinks=True
                )
                for libraries in binaries.tree[1:]:
                    shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        return replace(binaries, folder=copied / "bin", tree=())

    def reachable_program(self, program: Path) -> Path:
        """The same for a single self-contained program."""
        if self.shared is None:
            return program
        target = self._program_folder(program)
        if not target.exists():
            with _becomes(target) as draft:
                shutil.copy2(program, draft / program.name)
        return target / program.name

    def _program_folder(self, program: Path) -> Path:
        assert self.shared is not None
        _make_folder(self.shared, 0o711)
        stat = program.stat()
        # Another release of the wheel has another size or time, and gets a folder of its own.
        identity = f"{program}\0{stat.st_size}\0{stat.st_mtime_ns}"
        return self.shared / f"bin-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def choose_account() -> ServerAccount:
    """The account for this process's servers. Errors: LocalStackError."""
    if os.geteuid() != 0 and _has_name(os.geteuid()):
        return ServerAccount(RunAs())
    if os.geteuid() != 0:
        # initdb refuses a user that the machine does not know, as containers often run under;
        # in an empty namespace that user counts as `nobody`.
        return ServerAccount(RunAs(user_namespace=user_namespaces_work()))
    if user_namespaces_work():
        return ServerAccount(RunAs(user_namespace=True))
    return nobody_account()


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def nobody_account(shared: Path = SHARED_FOLDER) -> ServerAccount:
    """Way 2 for root. Errors: LocalStackError when the machine has no such user."""
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise LocalStackError(
            "Postgres does not run as root, user namespaces are refused here and there is no user "
            "`nobody`. Run octrain as a normal user, or set DATABASE_URL and REDIS_URL."
        ) from None
    return ServerAccount(RunAs(uid=entry.pw_uid, gid=entry.pw_gid), shared)


def _make_folder(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o777 != mode:
            folder.chmod(mode)
    except OSError as error:
        raise LocalStackError(f"Cannot make the folder {folder}: {error.strerror}") from error


@contextlib.contextmanager
def _becomes(target: Path) -> Iterator[Path]:
    """A folder that takes its final name when it is complete, readable by every account."""
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        yield draft
        for folder, _, files in os.walk(draft):
            os.chmod(folder, 0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        with contextlib.suppress(OSError):  # another process was first: the same content
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
