"""What a supervisor reads of its trainer and keeps until it is sent: collector and spool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octrain_worker.supervisor.collector import Collector, last_lines
from octrain_worker.supervisor.spool import Entry, Spool


def record(number: int) -> dict[str, Any]:
    return {"type": "event", "kind": f"e{number}", "message": "", "data": {}}


class TestSpool:
    def test_numbers_survive_and_nothing_is_read_twice(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path, segment_bytes=300)
        for number in range(1, 41):
            spool.append([Entry(record(number), "telemetry", number * 10)])
        assert spool.read(0, limit=3) == (1, [record(1), record(2), record(3)])
        assert spool.read(3, limit=2) == (4, [record(4), record(5)])
        assert spool.read(38) == (39, [record(39), record(40)])
        assert spool.read(40) == (41, [])
        spool.acknowledge(39)
        spool.close()
        assert len(list(tmp_path.glob("*.jsonl"))) <= 2
        again = Spool(tmp_path, segment_bytes=300)
        assert (again.last_seq, again.acknowledged_seq) == (40, 39)
        assert again.position("telemetry") == 400
        again.append([Entry(record(41))])
        assert again.read(39) == (40, [record(40), record(41)])
        again.close()

    def test_torn_last_line_is_cut_off(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        spool.append([Entry(record(1), "stdout", 5), Entry(record(2), "stdout", 9)])
        spool.close()
        (segment,) = tmp_path.glob("*.jsonl")
        segment.write_bytes(segment.read_bytes()[:-3])
        again = Spool(tmp_path)
        assert again.last_seq == 1
        assert again.position("stdout") == 5
        again.append([Entry(record(7))])
        assert again.read(0) == (1, [record(1), record(7)])
        again.close()

    def test_pieces_are_there_together_or_not_at_all(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path)
        spool.append([Entry(record(1), "telemetry", 5)])
        pieces = [Entry(record(n), goes_on=True) for n in (2, 3)]
        spool.append([*pieces, Entry(record(4), "telemetry", 9)])
        spool.close()
        (segment,) = tmp_path.glob("*.jsonl")
        whole = segment.read_bytes()
        again = Spool(tmp_path)
        assert (again.last_seq, again.position("telemetry")) == (4, 9)
        again.close()
        first = whole.index(b'"seq":2')
        for end in range(first, len(whole)):
            segment.write_bytes(whole[:end])
            torn = Spool(tmp_path)
            assert (torn.last_seq, torn.position("telemetry")) == (1, 5)
            torn.append([Entry(record(7))])
            assert torn.read(0) == (1, [record(1), record(7)])
            torn.close()

    def test_acknowledged_segment_under_the_cursor(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path, segment_bytes=1)
        for number in (1, 2, 3):
            spool.append([Entry(record(number))])
        first, records = spool.read(0)
        assert (first, len(records)) == (1, 3)
        spool.acknowledge(3)
        spool.append([Entry(record(4))])
        assert spool.read(3) == (4, [record(4)])
        spool.close()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 7), st.integers(80, 900))
    def test_any_batches_come_out_as_they_went_in(
        self, tmp_path_factory: pytest.TempPathFactory, batches: list[int], limit: int, size: int
    ) -> None:
        spool = Spool(tmp_path_factory.mktemp("spool"), segment_bytes=size)
        written = 0
        read: list[dict[str, Any]] = []
        for count in batches:
            spool.append([Entry(record(written + one)) for one in range(count)])
            written += count
            first, records = spool.read(len(read), limit=limit)
            assert first == len(read) + 1
            read += records
            spool.acknowledge(len(read))
        while len(read) < written:
            read += spool.read(len(read), limit=limit)[1]
        assert read == [record(number) for number in range(written)]
        spool.close()


class TestCollector:
    @pytest.fixture
    def collector(self, tmp_path: Path) -> Collector:
        self.spool = Spool(tmp_path / "spool")
        self.telemetry = tmp_path / "telemetry.jsonl"
        self.stdout = tmp_path / "stdout.log"
        return Collector(self.spool, telemetry=self.telemetry, logs={"stdout": self.stdout})

    def log(self) -> list[str]:
        return [
            one["text"]
            for one in self.spool.read(0, limit=10**6, max_bytes=1 << 30)[1]
            if one["type"] == "log"
        ]

    def test_lines_are_taken_when_whole_and_once(self, collector: Collector) -> None:
        with self.stdout.open("ab", buffering=0) as file:
            file.write(b"one\ntw")
            collector.collect()
            assert self.log() == ["one"]
            file.write(b"o\r\nbad \xff\0 bytes\nrest")
            collector.collect()
        collector.drain()
        assert self.log() == ["one", "two", "bad \ufffd\ufffd bytes", "rest"]

    def test_endless_line_is_cut(self, collector: Collector) -> None:
        self.stdout.write_bytes(b"y" * 40_000)
        collector.collect()
        assert self.log() == ["y" * 16_384 + " [... line cut after 16 KiB]"]

    def test_runaway_log_is_skipped_and_says_so(self, collector: Collector) -> None:
        self.stdout.write_bytes(b"spam and more spam\n" * (1 << 19) + b"end\n")
        collector.drain()
        text = self.log()
        assert "bytes) of stdout left out here" in text[0]
        assert text[-1] == "end"

    def test_unknown_telemetry_does_not_stop_the_rest(self, collector: Collector) -> None:
        known = {"seq": 2, "time": 1.0, "type": "phase", "phase": "training"}
        lines = ["not json", json.dumps(known), '{"type":"future"}', '{"torn":']
        self.telemetry.write_text("\n".join(lines))
        found = collector.collect()
        assert [one["type"] for one in found] == ["event", "phase", "event"]
        assert "seq" not in found[1]
        assert collector.collect() == []

    def test_last_lines(self, tmp_path: Path) -> None:
        out, err = tmp_path / "out", tmp_path / "err"
        out.write_text("a\nb\n")
        err.write_text("".join(f"{number}\n" for number in range(3)))
        assert last_lines([out, err, tmp_path / "none"], 4) == "b\n0\n1\n2"
