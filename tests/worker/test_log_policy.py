"""What is kept of what a trainer prints, and what a line tells of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.supervisor.log_policy import LogPolicy, LogReader
from octrain_worker.supervisor.log_words import level_of, rank_of

_LEFT_OUT = re.compile(r"\[\.\.\. ([\d,]+) lines \(([\d,]+) bytes\) of (\w+) left out here")


def left_out(texts: list[str]) -> tuple[int, int]:
    """Lines and bytes that the markers among the texts tell of."""
    found = [match for text in texts if (match := _LEFT_OUT.match(text))]
    counts = [[int(part.replace(",", "")) for part in match.groups()[:2]] for match in found]
    return sum(lines for lines, _ in counts), sum(size for _, size in counts)


class Printed:
    """A file that is printed into, and a reader of it with a clock of its own."""

    def __init__(self, folder: Path, policy: LogPolicy) -> None:
        self.path = folder / "stdout.log"
        self.path.touch()
        self.now = 0.0
        self.position = 0
        self.texts: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.printed = 0
        self._reader = LogReader("stdout", self.path, policy, lambda: self.now)

    def print(self, lines: int) -> None:
        with self.path.open("a") as file:
            for _ in range(lines):
                self.printed += 1
                file.write(f"{self.printed:08d} {'x' * 90}\n")

    def read(self, seconds: float = 0.2, *, ended: bool = False) -> int:
        """A round, so many seconds after the last; how many lines it gave."""
        self.now += seconds
        entries = list(self._reader.entries(self.position, ended=ended))
        for entry in entries:
            assert entry.position > self.position
            self.position = entry.position
            self.records.append(entry.record)
            self.texts.append(entry.record["text"])
        return len(entries)

    def drain(self) -> None:
        while self.read(0.0, ended=True):
            pass

    @property
    def numbers(self) -> list[int]:
        """Of the lines that came, in order."""
        return [int(text[:8]) for text in self.texts if text[:8].isdigit()]


_POLICY = LogPolicy(
    bytes_per_second=20_000,
    burst=40_000,
    total_bytes=400_000,
    late_bytes_per_second=2_000,
    backlog_bytes=60_000,
    kept_bytes=10_000,
)


def test_a_burst_passes_and_what_is_over_the_rate_follows(tmp_path: Path) -> None:
    printed = Printed(tmp_path, _POLICY)
    printed.print(500)  # 50 kB, each line costs 199
    printed.read()
    assert 195 <= len(printed.texts) <= 205, "the burst"
    rounds = 0
    while printed.position < printed.path.stat().st_size:
        printed.read()
        rounds += 1
    assert printed.numbers == list(range(1, 501)), "nothing is left out"
    assert 300 * 199 / 20_000 / 0.2 - 2 <= rounds <= 300 * 199 / 20_000 / 0.2 + 2


def test_a_flood_is_cut_counted_and_its_end_kept(tmp_path: Path) -> None:
    printed = Printed(tmp_path, _POLICY)
    for _ in range(300):  # a minute of 100 kB/s
        printed.print(200)
        printed.read()
    printed.drain()
    assert printed.numbers == sorted(set(printed.numbers)), "in order, none twice"
    assert printed.numbers[-100:] == list(range(printed.printed - 99, printed.printed + 1))
    lines, size = left_out(printed.texts)
    assert lines + len(printed.numbers) == printed.printed, "every line came or was counted"
    assert size == lines * 100
    shipped = 199 * len(printed.numbers)
    assert shipped <= 40_000 + 60 * 20_000 + 60_000
    assert {record.get("level") for record in printed.records if "left out" in record["text"]} == {
        "warning"
    }


def test_after_the_total_only_a_trickle(tmp_path: Path) -> None:
    printed = Printed(tmp_path, _POLICY)
    while len(printed.numbers) * 199 < 400_000:
        printed.print(20)
        printed.read(0.1)
    before = len(printed.numbers)
    for _ in range(600):
        printed.print(20)
        printed.read(0.1)
    came = (len(printed.numbers) - before) * 199
    assert 60 * 2_000 * 0.8 <= came <= 60 * 2_000 * 1.2 + 2_000
    printed.drain()
    assert left_out(printed.texts)[0] + len(printed.numbers) == printed.printed


def test_an_endless_line_is_cut(tmp_path: Path) -> None:
    printed = Printed(tmp_path, LogPolicy())
    with printed.path.open("a") as file:
        file.write("y" * 40_000)
    printed.read()
    assert printed.texts == ["y" * 16_384 + " [... line cut after 16 KiB]"]
    with printed.path.open("a") as file:
        for _ in range(8):
            file.write("z" * (1 << 20))
    for _ in range(10):
        printed.read()
    assert sum(map(len, printed.texts)) < 200_000
    assert printed.position == printed.path.stat().st_size


def test_a_file_that_was_emptied_begins_anew(tmp_path: Path) -> None:
    printed = Printed(tmp_path, LogPolicy())
    printed.print(20)
    printed.read()
    printed.path.write_text("anew\n")
    reader = LogReader("stdout", printed.path, LogPolicy())
    [entry] = reader.entries(printed.position, ended=False)
    assert (entry.record["text"], entry.position) == ("anew", 5)


@pytest.mark.parametrize(
    ("line", "level", "rank"),
    [
        ("2026-01-01 12:00:00,123 INFO fp8core.training: step 1", "info", None),
        ("WARNING:root:low memory", "warning", None),
        ("[rank3]:W1129 12:00:00.123456 42 torch/x.py:7] late", "warning", 3),
        ("[default0]:ERROR: no", "error", 0),
        ("E1129 12:00:00.123456 42 x.cc:7] no", "error", None),
        ("Traceback (most recent call last):", "error", None),
        ("[rank12]: Traceback (most recent call last):", "error", 12),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "error", None),
        ("KeyboardInterrupt", None, None),
        ("ValueError: bad", "error", None),
        ("/x/y.py:3: UserWarning: careful", "warning", None),
        ("[2026-01-01 00:00:00,000] [CRITICAL] gone", "critical", None),
        ("DEBUG quiet", "debug", None),
        ("error: no such file", "error", None),
        ("Fatal error: stopped", "critical", None),
        ("there was no error: all is well", None, None),
        ("step 10 loss 2.5", None, None),
        ("NON-INFO and INFORMATION", None, None),
        ("", None, None),
    ],
)
def test_level_and_rank_of_a_line(line: str, level: str | None, rank: int | None) -> None:
    assert (level_of(line), rank_of(line)) == (level, rank)


@pytest.mark.slow
def test_a_real_trainer_that_prints_100_megabytes_harms_nobody(workplace: Any) -> None:
    """More in a few seconds than is kept of an hour: the attempt ends well, and all is counted."""
    lines = 1_000_000
    attempt = workplace.api.add("att_1", {"flood_lines": lines, "steps": 3})
    workplace.supervise("att_1").wait(120)
    assert attempt.finished["outcome"] == "succeeded"
    assert attempt.steps == [1, 2, 3]
    texts = [record["text"] for record in attempt.of_type("log")]
    came = [int(text[:9]) for text in texts if text[:9].isdigit()]
    assert came == sorted(set(came))
    assert came[-100:] == list(range(lines - 100, lines)), "the last words are there"
    assert left_out(texts)[0] + len(came) == lines
    assert sum(map(len, texts)) < 12 << 20
