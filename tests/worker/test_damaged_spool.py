"""A spool that the disk has damaged: what can be read is sent, what is lost is told once."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octrain_worker.supervisor import segment as segment_module
from octrain_worker.supervisor.spool import Entry, Spool

SEGMENT = 2000


def record(number: int) -> dict[str, Any]:
    return {"type": "event", "kind": f"e{number}", "message": "x" * (number % 90), "data": {}}


class Api:
    """Takes every number once and in order, as the API does."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def take(self, spool: Spool, after: int, limit: int) -> int:
        """Gets one batch of what is after this number; the last number that is here now."""
        first, records = spool.read(after, limit=limit)
        assert first <= len(self.records) + 1, "a gap"
        self.records += records[len(self.records) + 1 - first :]
        spool.acknowledge(len(self.records))
        return len(self.records)

    def drain(self, spool: Spool, limit: int = 7) -> None:
        after = spool.acknowledged_seq
        while after < spool.last_seq:
            before = after
            after = self.take(spool, after, limit)
            assert after > before

    def told(self) -> list[dict[str, Any]]:
        return [one["data"] for one in self.records if one.get("kind") == "spool_damaged"]


def filled(folder: Path, count: int = 60) -> None:
    spool = Spool(folder, segment_bytes=SEGMENT)
    for number in range(1, count + 1):
        spool.append([Entry(record(number), "telemetry", number * 100)])
    spool.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def test_what_is_before_and_behind_the_damage_is_sent_and_the_loss_told_once(
    tmp_path: Path,
) -> None:
    folder, aside = tmp_path / "spool", tmp_path / "damaged"
    filled(folder)
    middle = files(folder)[1]
    whole = middle.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = int(middle.stem)
    # The third to the fifth of its records, and bytes on both sides that leave the others be.
    begin = sum(map(len, lines[:3]))
    size = sum(map(len, lines[3:6]))
    broken = whole[:begin] + b"\0" * (size - 1) + b"\n" + whole[begin + size :]
    middle.write_bytes(broken)
    spool, api = Spool(folder, damaged=aside, segment_bytes=SEGMENT), Api()
    assert (spool.last_seq, spool.position("telemetry")) == (60, 6000)
    # One at a time, and each batch once more: the answer to the first was lost.
    while len(api.records) < 60:
        again = spool.read(len(api.records), limit=1)[1]
        api.take(spool, len(api.records), 1)
        assert [{**one, "time": 0} for one in again] == [{**api.records[-1], "time": 0}]
    spool.append([Entry(record(61))])
    api.drain(spool)
    lost = range(first + 2, first + 5)
    for number, got in enumerate(api.records, start=1):
        if number in lost:
            assert (got["type"], got.get("kind")) == (
                ("event", "spool_damaged") if number == lost[-1] else ("lost", None)
            )
        else:
            assert got == record(number)
    assert api.told() == [{"bytes": size, "records": 3, "file": middle.name}]
    said = next(one["message"] for one in api.records if one.get("kind") == "spool_damaged")
    assert f"damaged/{middle.name} of the attempt" in said
    assert str(tmp_path) not in said
    assert (aside / middle.name).read_bytes() == broken
    assert not middle.exists()
    spool.close()


def test_an_api_that_has_the_damaged_records_is_told_of_no_loss(tmp_path: Path) -> None:
    filled(tmp_path, 9)
    api = Api()
    api.records = [record(number) for number in range(1, 8)]
    (only,) = files(tmp_path)
    only.write_bytes(only.read_bytes().replace(b'"kind":"e7"', b'"kind"\xff"e7"'))
    spool = Spool(tmp_path, segment_bytes=SEGMENT)
    api.drain(spool)
    assert api.records == [record(number) for number in range(1, 10)]
    spool.close()


def test_a_missing_file_and_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    second, third, fourth = files(tmp_path)[1:4]
    second.unlink()
    third.unlink()
    third.mkdir()
    spool, api = Spool(tmp_path, segment_bytes=SEGMENT), Api()
    real = Path.open

    def open_or_fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == fourth:
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_or_fail)
        with pytest.raises(OSError, match="too many"):
            # What may pass loses nothing.
            api.drain(spool)
    api.drain(spool)
    gone = range(int(second.stem), int(fourth.stem))
    for number, got in enumerate(api.records, start=1):
        assert (got == record(number)) == (number not in gone)
    assert [one["records"] for one in api.told()] == [
        int(third.stem) - int(second.stem),
        int(fourth.stem) - int(third.stem),
    ]
    spool.close()


def test_numbers_that_a_damaged_end_may_have_held_are_not_given_again(tmp_path: Path) -> None:
    filled(tmp_path, 9)
    api = Api()
    api.records = [record(number) for number in range(1, 10)]
    (only,) = files(tmp_path)
    data = only.read_bytes()
    only.write_bytes(data[:-300] + b"\0" * 300)
    spool = Spool(tmp_path, segment_bytes=SEGMENT)
    assert spool.last_seq >= 9
    # What came from the trainer is read again from where the last readable line was.
    assert spool.position("telemetry") < 900
    spool.append([Entry(record(100))])
    api.drain(spool)
    assert api.records[:9] == [record(number) for number in range(1, 10)]
    assert api.records[-1] == record(100)
    assert len(api.told()) == 1
    spool.close()


def test_where_the_newest_positions_are_gone_those_of_earlier_segments_count(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    newest = files(tmp_path)[-1]
    newest.write_bytes(b"\0" * newest.stat().st_size)
    spool = Spool(tmp_path, segment_bytes=SEGMENT)
    assert spool.position("telemetry") == (int(newest.stem) - 1) * 100
    spool.close()


def test_a_spool_whose_end_is_gone_goes_on_after_what_the_api_has(tmp_path: Path) -> None:
    filled(tmp_path, 9)
    (only,) = files(tmp_path)
    only.write_bytes(b"".join(only.read_bytes().splitlines(keepends=True)[:5]))
    (tmp_path / "acknowledged").write_text("9")
    api = Api()
    api.records = [record(number) for number in range(1, 10)]
    spool = Spool(tmp_path, segment_bytes=SEGMENT)
    spool.append([Entry(record(100))])
    api.drain(spool)
    assert api.records[9:] == [record(100)]
    spool.close()


@pytest.mark.parametrize("content", [b"", b"\0\0", b"9" * 5000, b"-4", b"\xff", b"77777777"])
def test_a_damaged_number_of_what_is_acknowledged(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path)
    (tmp_path / "acknowledged").write_bytes(content)
    spool, api = Spool(tmp_path, segment_bytes=SEGMENT), Api()
    api.drain(spool)
    assert api.records == [record(number) for number in range(1, 61)]
    spool.close()


def changed(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    """One letter or digit, which leaves JSON what it was."""
    begin = chance.choice([at for at, one in enumerate(data) if chr(one).isalnum()])
    other = b"7" if chr(data[begin]).isdigit() and data[begin] != ord("7") else b"y"
    return data[:begin] + other + data[begin + 1 :], begin, begin + 1


def zeroed(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.choice([1, 40, 512, 10**6]))
    return data[:begin] + b"\0" * (end - begin) + data[end:], begin, end


def garbage(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.choice([1, 40, 512, 10**6]))
    return data[:begin] + chance.randbytes(end - begin) + data[end:], begin, end


def nested(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = data.index(b"\n", chance.randrange(len(data) - 1)) + 1
    return data[:begin] + b"[" * 200_000 + b"\n" + data[begin:], begin, begin


OTHER_LINES = [
    *(b"7", b"[1]", b"null", b'"\\ud800"', b"{}", b"NaN", b'{"seq":1}', b'{"seq":3,"record":[]}'),
    *(b'{"seq":"2","record":{}}', b'{"seq":true,"record":{}}', b'{"positions":{"stdout":"x"}}'),
    *(b'{"seq":' + b"9" * 5000 + b',"record":{}}', b'{"seq":999999999,"record":{}}'),
]


def other_json(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = data.index(b"\n", chance.randrange(len(data) - 1)) + 1
    line = chance.choice(OTHER_LINES)
    return data[:begin] + line + b"\n" + data[begin:], begin, begin


def huge_line(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = data.index(b"\n", chance.randrange(len(data) - 1)) + 1
    return data[:begin] + b"\0" * (3 << 20) + b"\n" + data[begin:], begin, begin


def cut(data: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    begin = chance.randrange(len(data))
    return data[:begin], begin, len(data)


KINDS = [changed, zeroed, garbage, nested, other_json, huge_line, cut]


@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_loses_no_more_than_its_own_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[bytes, random.Random], tuple[bytes, int, int]],
) -> None:
    """A few dozen of each kind, in any file, with any part of it sent already."""
    monkeypatch.setattr(segment_module, "_LONGEST_LINE", 1 << 20)
    for seed in range(30):
        chance = random.Random(seed)
        folder, aside = tmp_path / f"{seed}", tmp_path / f"{seed}-damaged"
        filled(folder)
        where = chance.choice(files(folder))
        data, begin, end = kind(where.read_bytes(), chance)
        kept = where.read_bytes()
        hit, offset, number = set(), 0, int(where.stem) - 1
        for line in kept.splitlines(keepends=True):
            if (offset < end and begin < offset + len(line)) and number >= int(where.stem):
                hit.add(number)
            offset, number = offset + len(line), number + 1
        where.write_bytes(data)
        api = Api()
        sent = chance.randrange(61)
        api.records = [record(number) for number in range(1, sent + 1)]
        spool = Spool(folder, damaged=aside, segment_bytes=SEGMENT)
        cut_off = spool.last_seq
        spool.append([Entry(record(1000))])
        api.drain(spool, chance.choice([1, 7, 500]))
        told = api.told()
        for number in range(1, min(60, cut_off) + 1):
            intact = number <= sent or number not in hit
            assert api.records[number - 1] == record(number) or not intact, (seed, number)
        if cut_off >= sent:
            assert api.records[-1] == record(1000), seed
        fillers = [one for one in api.records if one["type"] == "lost"]
        assert len(fillers) + len(told) <= sum(one["records"] for one in told), seed
        # (One that looks torn by a crash was never sent, and its source is read again.)
        if kind is not cut and any(sent < number <= cut_off for number in hit):
            assert len(told) == 1 or api.records[max(hit) - 1] == record(max(hit)), seed
        if any(one["bytes"] for one in told):
            assert (aside / where.name).is_file()
        # Whoever opens it next finds nothing more to tell.
        spool.close()
        again = Spool(folder, damaged=aside, segment_bytes=SEGMENT)
        assert again.last_seq == spool.last_seq
        api.drain(again)
        assert api.told() == told
        again.close()
