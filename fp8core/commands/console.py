"""What a person sees of a run: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fp8core.training.position import Position

__all__ = ["RunConsole", "say", "silence"]

_SECONDS_BETWEEN_LINES = 5.0


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line, to stdout by default. Nobody reading, or a full disk, is no fault of a run."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """From now on what is written goes nowhere; what is buffered too, at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class RunConsole:
    """Shows the figures of a run as they come. Use it as a context manager."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._bar: Progress | None = None
        self._last_line = 0.0
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self._task = self._bar.add_task("train", total=total_steps, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def figures(self, position: Position, values: Mapping[str, float]) -> None:
        """Training or evaluation figures of the present step."""
        if "eval/loss" in values:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self._say(f"step {position.step}/{self._total}  {shown}")
            return
        text = (
            f"loss {values['train/loss']:.4f}  lr {values['train/lr']:.2e}  "
            f"{values['perf/tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=position.step, figures=text)
            return
        now = time.monotonic()
        ends = position.step in (1, self._total)
        if ends or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(f"step {position.step}/{self._total}  {text}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            try:
                self._bar.console.print(line, highlight=False)
            except OSError:  # the terminal was closed
                self._bar = None
                silence(sys.stdout)
        else:
            say(line)
