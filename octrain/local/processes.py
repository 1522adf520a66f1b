"""Child processes that never outlive us, and what /proc says about the others.

Every child is a direct child in a session of its own, and asks the kernel for a signal when the
thread that started it ends (``PR_SET_PDEATHSIG``). A launcher killed with SIGKILL therefore leaves
nothing behind. Because the kernel watches the *thread*, children are only started from the main
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octrain.local import enter
from octrain.local.errors import LocalStackError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUSER = 0x10000000
_PF_KTHREAD = 0x00200000  # Linux, include/linux/sched.h
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class RunAs:
    """How a child leaves root: not at all, in an empty user namespace, or as another user."""

    user_namespace: bool = False
    uid: int | None = None
    gid: int | None = None


@dataclass
class ManagedProcess:
    """One child: its command, where its output goes, how it is asked to stop."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    run_as: RunAs = field(default_factory=RunAs)
    stop_signal: signal.Signals = signal.SIGTERM
    popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self.popen.pid if self.popen is not None else None

    @property
    def returncode(self) -> int | None:
        """None while it runs (or was never started), else its exit status."""
        return self.popen.poll() if self.popen is not None else None

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        """Start it; its output is appended to ``log``. Errors: LocalStackError."""
        if self.running:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.popen = spawn(
                self.argv,
                output=descriptor,
                env=self.env,
                cwd=self.cwd,
                run_as=self.run_as,
                death_signal=self.stop_signal,
            )
        finally:
            os.close(descriptor)

    def request_stop(self) -> None:
        if self.popen is not None:
            with contextlib.suppress(ProcessLookupError):
                self.popen.send_signal(self.stop_signal)

    def wait(self, deadline: float) -> bool:
        """Wait for its end until ``deadline`` (time.monotonic seconds); True when it has ended."""
        if self.popen is None:
            return True
        try:
            self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()

    def stop(self, grace_seconds: float) -> bool:
        """Ask, wait, then kill. True when it ended by itself."""
        self.request_stop()
        if self.wait(time.monotonic() + grace_seconds):
            return True
        self.kill()
        return False

    def log_tail(self, lines: int = 12) -> str:
        return tail(self.log, lines)


def spawn(
    argv: Sequence[str],
    *,
    output: int,
    answer: int | None = None,
    stdin: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    run_as: RunAs | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a direct child that gets ``death_signal`` when we die. Errors: LocalStackError.

    Both its streams go to the descriptor ``output``, or its standard output to ``answer``.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LocalStackError(
            "Local servers must be started from the main thread: the kernel stops them when the "
            "thread that started them ends."
        )
    run_as = run_as or RunAs()
    try:
        return subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=output if answer is None else answer,
            stderr=output,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
            user=run_as.uid,
            group=run_as.gid,
            extra_groups=[] if run_as.uid is not None else None,
            preexec_fn=_child_setup(argv, env, death_signal, run_as.user_namespace),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalStackError(f"Cannot start {argv[0]}: {error}") from error


def _child_setup(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    death_signal: int,
    user_namespace: bool,
) -> Callable[[], None]:
    """What the child does between fork and exec. Everything it calls is looked up beforehand."""
    if not sys.platform.startswith("linux"):
        raise LocalStackError(
            "The local stack needs Linux. Elsewhere, point DATABASE_URL and REDIS_URL at servers."
        )
    libc = ctypes.CDLL(None, use_errno=True)
    unshare, prctl = libc.unshare, libc.prctl
    parent = os.getpid()
    otherwise = [sys.executable, "-I", "-S", str(Path(enter.__file__))]
    otherwise += [str(parent), str(int(death_signal)), *argv]
    environment = dict(os.environ if env is None else env)

    def setup() -> None:
        if user_namespace and unshare(_CLONE_NEWUSER) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # a fork hook has started a thread in this child
                os.execve(otherwise[0], otherwise, environment)
            raise PermissionError("unshare(CLONE_NEWUSER) was refused")
        # A change of credentials clears the death signal, so it comes last.
        if prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError("prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            os._exit(1)

    return setup


def user_namespaces_work() -> bool:
    """Whether a child may enter a user namespace of its own (Docker's seccomp often refuses)."""
    try:
        subprocess.run(
            ["/bin/true"],
            check=True,
            stderr=subprocess.DEVNULL,
            preexec_fn=_child_setup(["/bin/true"], None, signal.SIGKILL, True),
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def become_subreaper() -> None:
    """Orphaned descendants become our children, so that their ends can be awaited."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LocalStackError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def process_state(pid: int) -> str | None:
    """The state letter of /proc/PID/stat ("R", "S", "Z", ...); None when there is none such."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie (a PID 1 that does not reap leaves those)."""
    return process_state(pid) not in (None, "Z", "X")


def runs_a_program(pid: int) -> bool:
    """Whether the process lives and is no thread of the kernel's own."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] not in ("Z", "X") and not int(fields[6]) & _PF_KTHREAD


def processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def servers_in(folder: Path, program: str) -> list[int]:
    """Live processes of ``program`` whose working folder is ``folder`` (that we may look at)."""
    found = []
    for pid in processes():
        try:
            executable = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            working = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if working == str(folder) and executable.startswith(program) and is_alive(pid):
            found.append(pid)
    return found


def await_absence(find: Callable[[], list[int]], seconds: float) -> list[int]:
    """Wait until ``find`` returns nothing; what it still returns after ``seconds``."""
    deadline = time.monotonic() + seconds
    while left := find():
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_SECONDS)
    return []


def descendants(pid: int) -> list[int]:
    """Every live descendant of ``pid``, whatever session it put itself into."""
    children: dict[int, list[int]] = {}
    for other in processes():
        try:
            stat = Path(f"/proc/{other}/stat").read_text(errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(other)
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a text file, "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
