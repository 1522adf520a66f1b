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
        telemetry.record(3, {"train/loss": 1.25})
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
        telemetry.record(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
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
            telemetry.record(step, {"x": step})
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
        telemetry.record(1, values)
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


TRAINS_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from fp8core.telemetry import TelemetryWriter
telemetry = TelemetryWriter(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    step += 1
    telemetry.record(step, {f"m{i}": i / 3 for i in range(50)})
    telemetry.progress(step, 10**6, step, None)
    print(step, flush=True)
    time.sleep(0.1)
"""


def test_sigkill_takes_at_most_the_last_step_and_tears_no_number(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    last = 0
    for _ in range(3):  # an attempt and two that go on
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINS_UNTIL_KILLED, str(path), str(last)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        for _ in range(4):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kept = [r["step"] for r in records(path) if r["type"] == "metrics"]
        assert {*range(1, last)} <= {*kept}
        last = max(kept)  # where a checkpoint of the last step would let it go on
    seqs = [record["seq"] for record in records(path)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_an_error_and_an_end_write_all_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"

    def train() -> None:
        with TelemetryWriter(path) as telemetry:
            for step in range(500):
                telemetry.record(step, {"x": 1.0})
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert [record["step"] for record in records(path)] == list(range(500))


def test_after_its_end_it_takes_nothing(tmp_path: Path) -> None:
    telemetry = TelemetryWriter(tmp_path / "telemetry.jsonl")
    telemetry.close()
    with pytest.raises(ValueError, match="closed"):
        telemetry.phase("saving")
    telemetry.close()


def test_flush_waits_for_what_was_recorded_before(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        for step in range(100):
            telemetry.record(step, {"x": 1.0}, health=step % 2 == 0)
        assert telemetry.flush(30)
        assert [record["step"] for record in records(path)] == list(range(100))
        assert telemetry.flush(0)


def test_what_changes_after_it_was_recorded_is_recorded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    data: dict[str, list[int]] = {"layers": [1]}
    values = {"x": 1.0}
    with TelemetryWriter(path) as telemetry:
        for _ in range(50):
            telemetry.record(1, values)
            telemetry.event("kept", "x", data)
            values["x"] += 1.0
            data["layers"][0] += 1
    found = records(path)
    assert [r["values"]["x"] for r in found if r["type"] == "metrics"] == [*range(1, 51)]
    assert [r["data"]["layers"] for r in found if r["type"] == "event"] == [
        [count] for count in range(1, 51)
    ]


def test_what_is_no_json_is_refused_where_it_is_recorded(tmp_path: Path) -> None:
    with TelemetryWriter(tmp_path / "telemetry.jsonl") as telemetry:
        with pytest.raises(TypeError):
            telemetry.event("odd", "x", {"object": object()})
        telemetry.phase("training")
    assert [record["type"] for record in records(tmp_path / "telemetry.jsonl")] == ["phase"]


# A file size limit cuts a write short just as a full disk does, only under another error number.
FILLED = """
import resource, signal, sys
from pathlib import Path
from fp8core.telemetry import TelemetryWriter
path = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
telemetry = TelemetryWriter(path, health_bytes=int(sys.argv[2]), most_bytes=int(sys.argv[3]))
telemetry.phase("training")
assert telemetry.flush(30)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))
for step in range(40):
    telemetry.record(step, {"train/loss": 1.0})
    telemetry.record(step, {f"fp8/l{i}/input/amax": 1.0 for i in range(50)}, health=True)
    telemetry.progress(step, 40, step, None)
    if step % 10 == 0:
        telemetry.event("kept", str(step))
        telemetry.checkpoint(step, "c", kind="periodic", best=False, metric=None)
assert not telemetry.flush(0.2)
assert telemetry.last_seq == 1, telemetry.last_seq
if sys.argv[4] == "recovers":
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert telemetry.flush(30)
    telemetry.record(40, {"train/loss": 1.0})
telemetry.close()
print(telemetry.dropped)
"""


def filled(path: Path, health_bytes: int, most_bytes: int, end: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(path), str(health_bytes), str(most_bytes), end],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout), done.stderr


def test_on_a_full_disk_only_fp8_health_is_dropped_counted_and_told(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    dropped, _ = filled(path, 200_000, 1_000_000, "recovers")
    found = records(path)
    assert [record["seq"] for record in found] == list(range(1, len(found) + 1))
    losses = [r for r in found if r["type"] == "metrics" and "train/loss" in r["values"]]
    assert [r["step"] for r in losses] == list(range(41))
    assert [r["step"] for r in found if r["type"] == "progress"] == list(range(40))
    assert [r["message"] for r in found if r.get("kind") == "kept"] == ["0", "10", "20", "30"]
    assert [r["step"] for r in found if r["type"] == "checkpoint"] == [0, 10, 20, 30]
    health = [r["step"] for r in found if "fp8/l0/input/amax" in r.get("values", {})]
    assert health == list(range(40 - len(health), 40)), "the oldest go first"
    assert 0 < len(health) < 40
    assert dropped == 50 * (40 - len(health))
    [event] = [r for r in found if r.get("kind") == "telemetry_dropped"]
    assert event["data"] == {
        "health_records": 40 - len(health),
        "other_records": 0,
        "values": dropped,
    }
    reported = [r["values"]["telemetry/dropped"] for r in losses if len(r["values"]) > 1]
    assert reported == [dropped]
    [delayed] = [r for r in found if r.get("kind") == "telemetry_delayed"]
    assert delayed["data"]["error"] == "No space left on device"


def test_beyond_the_last_bound_metrics_go_but_never_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    filled(path, 0, 30_000, "recovers")
    found = records(path)
    steps = [r["step"] for r in found if r["type"] == "progress"]
    assert steps == list(range(40 - len(steps), 40))
    assert 0 < len(steps) < 40
    assert [r["message"] for r in found if r.get("kind") == "kept"] == ["0", "10", "20", "30"]
    assert [r["step"] for r in found if r["type"] == "checkpoint"] == [0, 10, 20, 30]
    [event] = [r for r in found if r.get("kind") == "telemetry_dropped"]
    assert event["data"]["health_records"] == 40
    assert event["data"]["other_records"] > 0


def test_a_disk_that_stays_full_does_not_hold_the_end_up(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    _, errors = filled(path, 1_000_000, 1_000_000, "stays full")
    assert "telemetry records could not be written" in errors
    assert len(records(path)) == 1


def test_an_hour_of_500_series_every_10_steps_fits(tmp_path: Path) -> None:
    """What an hour without the API leaves on the disk, at ten steps a second: 3,600 records of
    health and 36,000 each of losses and progress, less than 256 MiB of them; the spool holds the
    same once more. A tenth of the hour is written."""
    path = tmp_path / "telemetry.jsonl"
    tensors = ("input", "weight", "grad_output")
    figures = ("amax", "scale", "saturated", "underflow")
    names = [
        f"fp8/model.layers.{layer}.mlp.down_proj/{tensor}/{figure}"
        for layer in range(42)
        for tensor in tensors
        for figure in figures
    ][:500]
    with TelemetryWriter(path) as telemetry:
        for step in range(3600):
            telemetry.record(step, {f"train/{n}": step / 7 + n for n in range(8)})
            telemetry.progress(step, 10**6, step * 4096, 1234.567)
            if step % 10 == 0:
                telemetry.record(step, dict.fromkeys(names, (step + 1) / 3), health=True)
                assert telemetry.flush(60)  # a step takes longer than to write it
        assert telemetry.flush(60)
        assert telemetry.dropped == 0
    assert 10 * path.stat().st_size < 256 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "bool"])
def test_tensors_are_recorded_as_they_are_now(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "telemetry.jsonl"
    value = torch.ones((), dtype=getattr(torch, dtype))
    with TelemetryWriter(path) as telemetry:
        for step in range(20):
            telemetry.record(step, {"a": value, "b": 2.5, "c": torch.tensor([math.nan])})
            value.fill_(step + 2)
        with pytest.raises(ValueError, match=r"d is a tensor of torch.float32 \(3,\)"):
            telemetry.record(20, {"d": torch.zeros(3)})
    found = records(path)
    wanted = [1.0] * 20 if dtype == "bool" else [float(step + 1) for step in range(20)]
    assert [record["values"]["a"] for record in found] == wanted
    assert found[3]["values"] == {"a": wanted[3], "b": 2.5, "c": "NaN"}


def test_a_device_that_fails_costs_its_own_numbers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from fp8core.numerics.landing import Landing

    def fails(self: Landing) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Landing, "arrived", property(fails))
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        telemetry.record(1, {"a": torch.ones(()), "b": 2.0})
        telemetry.record(2, {"a": torch.ones(())})
        telemetry.event("kept", "x")
    found = records(path)
    assert found[0]["values"] == {"b": 2.0, "telemetry/dropped": 1.0}
    assert [r["kind"] for r in found[1:]].count("kept") == 1
    assert telemetry.dropped == 2


@pytest.mark.gpu
def test_recording_does_not_wait_for_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path) as telemetry:
        value = torch.zeros((), device="cuda")
        telemetry.record(0, {"a": value})
        assert telemetry.flush(30)
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 33)  # cycles: about five seconds, for a machine that is busy
        value += 1
        begun = torch.cuda.Event()
        begun.record()
        telemetry.record(1, {"a": value})
        value += 1
        telemetry.record(2, {"a": value, "b": 1.0})
        assert not begun.query(), "the device had finished before record() returned"
        assert not telemetry.flush(0)
        assert telemetry.flush(30)
    assert [record["values"]["a"] for record in records(path)] == [0.0, 1.0, 2.0]


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, fp8core.telemetry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
