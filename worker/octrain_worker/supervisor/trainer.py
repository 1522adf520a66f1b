"""The trainer process: started with its libraries imported, told later what to train.

Every trainer begins as a spare: ``python -m fp8core spare`` imports and then waits for one JSON
line on its standard input. Whether that line comes at once or an hour later is the only difference
between a cold and a warm start. For a job of several ranks the same process becomes their launcher:
it starts them through torchrun, takes signals for all of them, and ends with the exit code of all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octrain_worker.supervisor.process_tree import die_with_parent, read_process, send_signal

__all__ = ["Trainer"]


class Trainer:
    """One trainer, a direct child of this process and dead with it.

    To be constructed by the main thread (the kernel ties the child's life to the thread that forks)
    while it is the only one (nothing but exec is safe in a fork of several).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: Path,
        stderr: Path,
    ) -> None:
        parent = os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        output = os.open(stdout, flags, 0o600)
        errors = os.open(stderr, flags, 0o600)
        try:
            self._process = subprocess.Popen(
                [*command, "spare"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        finally:
            os.close(output)
            os.close(errors)
        self.pid = self._process.pid
        self.status: int | None = None
        self.begun = False

    def begin(self, order: Mapping[str, Any]) -> None:
        """Tells it what to train. A trainer that died meanwhile is found out by its status."""
        self.begun = True
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.close()
        except BrokenPipeError:
            pass

    def send(self, number: signal.Signals) -> None:
        process = read_process(self.pid)
        if self.status is None and process is not None:
            send_signal(process, number)

    def reap(self) -> None:
        """Takes the status of every ended child of this process, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
                # Popen must not wait for it again.
                self._process.returncode = self.status
