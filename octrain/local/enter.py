"""Become another program in an empty user namespace.

    python -I -S enter.py PARENT SIGNAL ARGV...

For the child of a program whose fork hooks start threads (tracing libraries do): the kernel lets
only a process of one thread enter a namespace, and a program that has just been executed is one.
Exit status 1 with the reason on standard error when it cannot be done.
"""

import ctypes
import os
import signal
import sys

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1


def main(parent: str, death_signal: str, *argv: str) -> None:
    """Enter the namespace, ask for the signal at the parent's end, and become ``argv``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWUSER) != 0
        or libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0
    ):
        sys.exit(f"{argv[0]} is not started: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit(f"{argv[0]} is not started: what asked for it has ended")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by this interpreter
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(*sys.argv[1:])
