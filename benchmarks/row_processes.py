"""Rows of a benchmark in processes of their own, all imported before the first is measured.

A row's process takes ten seconds to import its libraries and two or three to train. So all of a
group start at once, each says when it has imported, and only when the last has do they take their
turns: nothing but the row in turn does anything then, and nothing but it has touched the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

__all__ = ["READY", "ends_of", "wait_for_turn"]

READY = "ready"


def wait_for_turn() -> None:
    """In a row's process: says that all is imported, and returns when it is this row's turn."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the benchmark ended before this row's turn")


def ends_of(
    commands: Sequence[list[str]], environment: dict[str, str]
) -> Iterator[tuple[int, list[str], str]]:
    """Of each command, in order: exit status, lines of stdout behind ``READY``, and stderr."""
    most = os.cpu_count() or 1
    for first in range(0, len(commands), most):
        group = commands[first : first + most]
        with tempfile.TemporaryDirectory() as folder:
            started = [
                _Waiting(command, environment, os.path.join(folder, str(number)))
                for number, command in enumerate(group)
            ]
            try:
                for process in started:
                    process.wait_until_ready()
                for process in started:
                    yield process.take_turn()
            finally:
                for process in started:
                    process.end()


class _Waiting:
    def __init__(self, command: list[str], environment: dict[str, str], errors: str) -> None:
        self._errors: IO[str] = open(errors, "w+")  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Or until it has ended, which its turn will tell."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return

    def take_turn(self) -> tuple[int, list[str], str]:
        said, _ = self._process.communicate("\n" if self._process.poll() is None else None)
        self._errors.seek(0)
        return self._process.returncode, said.strip().splitlines(), self._errors.read().strip()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()
