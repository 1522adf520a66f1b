"""The telemetry file: numbered without gaps, whole after a crash, strict JSON."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fp8core.telemetry import TelemetryWriter, decode_number, encode_number, read_records


def records(path: Path) -> list[dict[str, object]]:
    return [record for record, _ in read_records(path)]


def test_records_are_numbered_and_carry_their_time(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path, clock=lambda: 12.5) as telemetry:
        telemetry.phase("training")
        telemetry.metrics(3, {"train/loss": 1.25})
        telemetry.progress(3, 10, 480, None)
        telemetry.event("resumed", "from step 2", {"step": 2})
        telemetry.checkpoint(3, "checkpoints/step-00000003", kind="periodic", best=True, metric=1.0)
        telemetry.artifact("model", "model", 3)
    found = records(path)
    assert [record["seq"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert {record["time"] for record in found} == {12.5}
    assert found[1] == {
        "seq": 2,
        "time": 12.5,
        "type": "metrics",
        "step": 3,
        "values": {"train/loss": 1.25},
    }
    assert found[4]["best"] is True
    assert found[4]["metric"] == 1.0


def test_non_finite_numbers_are_strings_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        telemetry.metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
        telemetry.event("odd", "x", {"list": [math.nan, 1], "tuple": (math.inf,)})
        telemetry.checkpoint(1, "p", kind="final", best=False, metric=math.nan)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1}
    assert lines[1]["data"] == {"list": ["NaN", 1], "tuple": ["Infinity"]}
    assert lines[2]["metric"] == "NaN"
    assert math.isnan(decode_number("NaN"))
    assert decode_number(encode_number(-math.inf)) == -math.inf
    with pytest.raises(ValueError, match="not a number"):
        decode_number("nan")


@pytest.mark.parametrize(
    "torn",
    [
        b'{"seq":4,"ty',
        b'{"seq":4}',
        b"\0\0\0\0",
        b"\0\0\0\n",
        b'{"seq":4,"x\n\0\0',
        b"half\nhalf\n",
    ],
)
def test_a_torn_tail_is_cut_off_and_numbers_go_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        for step in range(3):
            telemetry.metrics(step, {"x": step})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with TelemetryWriter(path) as telemetry:
        assert path.read_bytes() == whole
        assert telemetry.last_seq == 3
        telemetry.phase("training")
    assert [record["seq"] for record in records(path)] == [1, 2, 3, 4]


def test_a_long_last_record_is_found_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    values = {f"fp8/layer.{index}/input/amax": float(index) for index in range(8000)}
    with TelemetryWriter(path) as telemetry:
        telemetry.phase("training")
        telemetry.metrics(1, values)
    size = path.stat().st_size
    assert size > 1 << 17
    with TelemetryWriter(path) as telemetry:
        assert telemetry.last_seq == 2
    assert path.stat().st_size == size
    with path.open("ab") as file:
        file.write(b"x" * (1 << 18))
    with TelemetryWriter(path) as telemetry:
        assert telemetry.last_seq == 2
    assert path.stat().st_size == size


def test_a_file_of_rubbish_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(b"rubbish without a newline")
    with TelemetryWriter(path) as telemetry:
        telemetry.phase("loading")
    assert [record["seq"] for record in records(path)] == [1]


def test_a_reader_goes_on_from_its_offset_and_leaves_the_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        telemetry.phase("loading")
        telemetry.phase("training")
    (first, offset), _ = read_records(path)
    assert first["seq"] == 1
    with path.open("ab") as file:
        file.write(b'{"seq":3')
    assert [record["seq"] for record, _ in read_records(path, offset)] == [2]


KILLED_WHILE_WRITING = """
import sys
from pathlib import Path
from fp8core.telemetry import TelemetryWriter
telemetry = TelemetryWriter(Path(sys.argv[1]))
print("ready", flush=True)
step = 0
while True:
    step += 1
    telemetry.metrics(step, {f"m{i}": i / 3 for i in range(50)})
"""


def test_sigkill_loses_no_record_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    for count in range(1, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while path.stat().st_size < count * 200_000:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    seqs = [record["seq"] for record in records(path)]
    assert seqs == list(range(1, len(seqs) + 1))


FILLED = """
import os, resource, signal, sys
from pathlib import Path
import fp8core.telemetry as telemetry_module
from fp8core.telemetry import TelemetryWriter
import errno
path = Path(sys.argv[1])
telemetry_module._MAX_PENDING = 5
telemetry_module._DISK_FULL = frozenset({errno.EFBIG})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
telemetry = TelemetryWriter(path)
telemetry.phase("training")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))
for step in range(20):
    telemetry.metrics(step, {"x": 1.0})
    if step % 10 == 0:
        telemetry.event("kept", str(step))
assert telemetry.last_seq == 1, telemetry.last_seq
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
telemetry.phase("saving")
telemetry.close()
"""


def test_when_the_disk_is_full_only_metrics_are_dropped_and_counted(tmp_path: Path) -> None:
    # A file size limit cuts a write short just as a full disk does, only under another errno.
    path = tmp_path / "telemetry.jsonl"
    subprocess.run([sys.executable, "-c", FILLED, str(path)], check=True)
    found = records(path)
    assert [record["seq"] for record in found] == list(range(1, len(found) + 1))
    assert [r["message"] for r in found if r.get("kind") == "kept"] == ["0", "10"]
    assert [r["phase"] for r in found if r["type"] == "phase"] == ["training", "saving"]
    steps = [r["step"] for r in found if r["type"] == "metrics"]
    assert steps == sorted(steps)
    assert steps[-1] == 19
    dropped = [r for r in found if r.get("kind") == "telemetry_dropped"]
    assert [r["data"] for r in dropped] == [{"count": 20 - len(steps)}]


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, fp8core.telemetry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
