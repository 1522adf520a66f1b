"""On a terminal a run shows a progress bar; what cannot be shown ends no run."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from fp8core.commands.console import RunConsole
from fp8core.training.position import Position

STEP = {"train/loss": 1.5, "train/lr": 1e-3, "perf/tokens_per_second": 2000.0}


class Terminal:
    """A pseudo-terminal whose screen is read as it fills."""

    def __init__(self) -> None:
        self._screen, writing = pty.openpty()
        self.stream: TextIO = os.fdopen(writing, "w", buffering=1)
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._screen, 4096):
                self._shown += part
        except OSError:  # how Linux says that the other side is closed
            pass

    def close(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self._screen)
        return self._shown.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    yield terminal
    if not terminal.stream.closed:
        terminal.close()


def test_a_terminal_shows_a_bar_and_evaluations_above_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal.stream)
    with RunConsole(10) as console:
        console.figures(Position(step=5), STEP)
        console.figures(Position(step=5), {"eval/loss": 1.25})
        console.figures(Position(step=10), STEP)
    shown = terminal.close()
    assert "\x1b[" in shown
    assert "10/10" in shown
    assert "loss 1.5000" in shown
    assert "2,000 tokens/s" in shown
    assert "step 5/10  eval/loss 1.2500" in shown


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with RunConsole(10) as console:
        for step in range(1, 11):
            console.figures(Position(step=step), STEP)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/10  loss 1.5000")
    assert lines[-1].startswith("step 10/10  ")
    assert len(lines) < 10  # a line every few seconds, and the first and the last


def test_a_full_disk_under_the_output_is_no_fault_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  # closed when what it could not take is dropped
    monkeypatch.setattr("sys.stdout", full)
    with RunConsole(2) as console:
        console.figures(Position(step=1), STEP)
        console.figures(Position(step=2), STEP)
    full.close()
