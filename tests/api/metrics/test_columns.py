"""Columns, rollups and bodies by themselves, against plain Python."""

from __future__ import annotations

import json
import math
import struct
import zlib
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octrain_api.attempts.body import MAX_CELLS, parse
from octrain_api.metrics import codec, rollups, summary
from octrain_api.metrics.blocks import Block, Record, join, of_records, unpack
from octrain_api.metrics.repository import StoredMatrix, _by_batch
from octrain_api.problems import Problem
from octrain_api.settings import HttpSettings
from octrain_worker.supervisor.packing import pack

LIMIT = HttpSettings(max_body_bytes=1 << 20)
VALUES = st.floats(width=64) | st.sampled_from(
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, -1.7e308, 0.1]
)
NAMES = st.sampled_from(["train/loss", "a", "b", "fp8/x/amax", "é\n", "z" * 512])
RECORDS = st.lists(
    st.builds(
        lambda step, values, time, tokens: {
            "type": "metrics",
            "step": step,
            "time": time,
            "tokens": tokens,
            "values": values,
        },
        st.integers(0, 2**62 - 1) | st.integers(0, 200),
        st.dictionaries(NAMES, VALUES, min_size=1),
        st.none() | st.floats(0, 1e12),
        st.none() | st.integers(0, 2**62),
    )
    | st.just({"type": "phase", "phase": "training"}),
    max_size=30,
)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def same(a: float, b: float) -> bool:
    """Bit for bit, but that one NaN is like another."""
    return (math.isnan(a) and math.isnan(b)) or bits(a) == bits(b)


def sent(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the supervisor reads them from the trainer's file."""
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}

    def spelt(value: float) -> float | str:
        return "NaN" if math.isnan(value) else names.get(value, value)

    return [
        {**r, "values": {n: spelt(v) for n, v in r["values"].items()}} if "values" in r else r
        for r in records
    ]


def cells(block: Block) -> dict[tuple[str, int], float]:
    return {
        (name, row): float(block.values[column, row])
        for column, name in enumerate(block.names)
        for row in range(len(block.rows))
        if block.present is None or block.present[column, row]
    }


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.integers(0, 35))
def test_what_the_supervisor_packs_is_what_the_api_unpacks(
    records: list[dict[str, Any]], skipped: int
) -> None:
    batch = parse(pack(7, 11, sent(records)), LIMIT)
    assert (batch.fencing_token, batch.first_seq, batch.count) == (7, 11, len(records))
    rest = batch.after(skipped)
    assert (rest.first_seq, rest.count) == (11 + skipped, max(len(records) - skipped, 0))
    for of, kept in ((batch, records), (rest, records[skipped:])):
        assert [r for _, r in of.records] == [r for r in kept if r["type"] != "metrics"]
        found: dict[tuple[int, str], float] = {}
        for frame in of.frames:
            # What is stored as it came is what was looked at.
            block = unpack(frame.packed)
            assert cells(block).keys() == cells(frame.block).keys()
            for (name, row), value in cells(block).items():
                found[frame.offsets[row], name] = value
                record = kept[frame.offsets[row]]
                assert int(block.rows.steps[row]) == record["step"]
                assert int(block.rows.tokens[row]) == (
                    -1 if record["tokens"] is None else record["tokens"]
                )
                time = math.nan if record["time"] is None else record["time"]
                assert same(float(block.rows.times[row]), time)
        expected = {
            (offset, name): value
            for offset, record in enumerate(kept)
            for name, value in record.get("values", {}).items()
        }
        assert found.keys() == expected.keys()
        assert all(same(found[key], value) for key, value in expected.items())


def test_tokens_come_from_the_progress_of_the_step() -> None:
    records = [
        {"type": "metrics", "step": 1, "values": {"a": 1}},
        {"type": "progress", "step": 1, "tokens": 640},
        {"type": "metrics", "step": 2, "values": {"a": 2}},
    ]
    (frame,) = parse(pack(1, 1, records), LIMIT).frames
    assert frame.block.rows.tokens.tolist() == [640, -1]


@pytest.mark.parametrize(
    "record",
    [
        {"type": "metrics", "step": -1, "values": {"a": 1.0}},
        {"type": "metrics", "step": True, "values": {"a": 1.0}},
        {"type": "metrics", "step": 1, "values": {"a": True}},
        {"type": "metrics", "step": 1, "values": {"a": "one"}},
        {"type": "metrics", "step": 1, "values": {"": 1.0}},
        {"type": "metrics", "step": 1, "values": {"n" * 513: 1.0}},
        {"type": "metrics", "step": 1, "values": {"a": 10**400}},
        {"type": "metrics", "step": 1, "values": None},
        {"type": "metrics", "step": 1, "values": {}},
    ],
)
def test_a_record_that_fits_in_no_column_goes_as_it_is(record: dict[str, Any]) -> None:
    good = {"type": "metrics", "step": 1, "values": {"a": 2.0}}
    batch = parse(pack(1, 1, [good, record, good]), LIMIT)
    assert list(batch.records) == [(1, record)]
    assert [list(frame.offsets) for frame in batch.frames] == [[0, 2]]


def test_many_sets_of_names_share_matrices() -> None:
    records = [{"type": "metrics", "step": n, "values": {f"m{n}": float(n)}} for n in range(300)]
    batch = parse(pack(1, 1, records), LIMIT)
    assert len(batch.frames) <= 16
    found = {name: v for frame in batch.frames for (name, _), v in cells(frame.block).items()}
    assert found == {f"m{n}": float(n) for n in range(300)}


def body_of(head: dict[str, Any], data: bytes) -> bytes:
    packed = zlib.compress(json.dumps(head).encode())
    return b"OCT1" + struct.pack("<I", len(packed)) + packed + data


def frame_of(data: bytes, **changes: Any) -> dict[str, Any]:
    frame = {
        "names": ["a", "b"],
        "offsets": [0, 1],
        "steps": [1, 2],
        "times": [None, 1.0],
        "tokens": [None, 5],
        "masked": False,
        "bands": [[2, len(data)]],
    }
    return {
        "fencing_token": 1,
        "first_seq": 1,
        "count": 2,
        "records": [],
        "frames": [frame | changes],
    }


GOOD = zlib.compress(codec.shuffle(np.arange(4.0)))


def test_the_frame_that_the_refusals_start_from_is_good() -> None:
    (frame,) = parse(body_of(frame_of(GOOD), GOOD), LIMIT).frames
    assert frame.block.values.tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"names": ["a", "a"]}, "two columns"),
        ({"names": ["a"]}, "other columns"),
        ({"names": ["a", ""]}, "1 to 512"),
        ({"names": ["a\ud800", "a\udfff"]}, "differ only"),
        ({"steps": [1]}, "differ in length"),
        ({"steps": [1, -2]}, "a step is"),
        ({"steps": [1, 2**63]}, "a step is"),
        ({"steps": [1, "2"]}, "valid integer"),
        ({"times": [None, "x"]}, "valid number"),
        ({"tokens": [None, 2**70]}, "too large"),
        ({"offsets": [1, 0]}, "do not rise"),
        ({"offsets": [0, 2]}, "not those from 0 to 1"),
        ({"offsets": [0, 0]}, "do not rise"),
        ({"bands": []}, "at least one column"),
        ({"bands": [[2, 0]]}, "at least one column"),
        ({"bands": [[2, len(GOOD) + 1]]}, "do not fill"),
        ({"bands": [[2, len(GOOD) - 1]]}, "do not fill"),
        ({"masked": True}, "cells are filled"),
        ({"masked": "yes"}, "valid boolean"),
        ({"surprise": 1}, "not permitted"),
    ],
)
def test_frames_that_are_not_what_they_say_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Problem) as caught:
        parse(body_of(frame_of(GOOD, **changes), GOOD), LIMIT)
    assert caught.value.status == 422
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (zlib.compress(bytes(33)), "more than the 32 bytes"),
        (zlib.compress(bytes(24)), "has 24 bytes"),
        (zlib.compress(bytes(32))[:-1], "do not end"),
        (zlib.compress(bytes(32)) + b"x", "do not end"),
        (b"no zlib at all", "do not decompress"),
        (zlib.compress(bytes(1 << 26), 9), "more than the 32 bytes"),
    ],
)
def test_data_that_are_not_the_columns_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(Problem, match=says):
        parse(body_of(frame_of(data), data), LIMIT)


def test_a_bomb_is_refused_before_it_is_large() -> None:
    """What is decompressed is bounded by what is said; what is said is bounded."""
    with pytest.raises(Problem, match="more than the 1048576 bytes"):
        parse(
            b"OCT1" + struct.pack("<I", len(bomb := zlib.compress(bytes(1 << 28), 9))) + bomb, LIMIT
        )
    rows = 2000
    columns = MAX_CELLS // rows + 1
    many = {
        "names": [f"m{n}" for n in range(columns)],
        "offsets": list(range(rows)),
        "steps": [1] * rows,
        "times": [None] * rows,
        "tokens": [None] * rows,
        "bands": [[columns, len(GOOD)]],
    }
    with pytest.raises(Problem, match="cells: at most"):
        parse(body_of(frame_of(GOOD, **many) | {"count": rows}, GOOD), LIMIT)


@pytest.mark.parametrize("body", [b"", b"OCT1", b"{}", b"OCT1\xff\xff\xff\xffabc", b"OCT1\0\0\0\0"])
def test_bodies_of_another_kind_are_refused(body: bytes) -> None:
    with pytest.raises(Problem):
        parse(body, LIMIT)


BLOCKS = st.lists(
    st.lists(
        st.builds(
            Record,
            st.integers(0, 200) | st.integers(0, 2**40),
            st.floats(0, 1e9),
            st.integers(-1, 10**9),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, min_size=1),
        ),
        min_size=1,
        max_size=25,
    ),
    min_size=1,
    max_size=4,
)


def numbered(batches: list[list[Record]]) -> list[Block]:
    blocks = []
    for seq, batch in enumerate(batches):
        for block in of_records(batch):
            rows = block.rows
            seqs = np.full(len(rows), seq)
            rows = codec.Rows(rows.steps, seqs, rows.times, rows.tokens)
            blocks.append(Block(block.names, rows, block.values, block.present))
    return blocks


@settings(max_examples=60, deadline=None)
@given(BLOCKS)
def test_joined_blocks_hold_the_points_of_all_in_their_order(batches: list[list[Record]]) -> None:
    block = join(numbered(batches))
    stored = unpack(block.pack())
    rows = codec.unpack_rows(codec.pack_rows(block.rows), len(block.rows))
    stats = np.frombuffer(block.stats(), dtype=np.dtype([*np_stats()]))
    expected = [r for batch in batches for r in batch]
    for column, name in enumerate(stored.names):
        found = [
            (int(rows.steps[row]), float(stored.values[column, row]), int(rows.tokens[row]))
            for row in range(len(rows))
            if stored.present is None or stored.present[column, row]
        ]
        wanted = [(r.step, r.values[name], r.tokens) for r in expected if name in r.values]
        assert [(s, t) for s, _, t in found] == [(s, t) for s, _, t in wanted]
        assert all(same(a[1], b[1]) for a, b in zip(found, wanted, strict=True))
        first, last, value, count = stats[column].tolist()
        assert (first, last, count) == (
            min(s for s, _, _ in wanted),
            max(s for s, _, _ in wanted),
            len(wanted),
        )
        assert same(value, wanted[-1][1])
    assert {name for r in expected for name in r.values} == set(stored.names)


def np_stats() -> list[tuple[str, str]]:
    return [("first", "<i8"), ("last", "<i8"), ("value", "<f8"), ("count", "<u4")]


def check_bucket(found: summary.Summary, at: int, points: list[tuple[int, float]]) -> None:
    """A bucket against the points that it holds, in the order of recording."""
    finite = [(s, v) for s, v in points if math.isfinite(v)]
    odd = [(s, v) for s, v in points if not math.isfinite(v)]
    assert int(found.count[at]) == len(points)
    assert int(found.non_finite[at]) == len(odd)
    # Python's sort and min keep the order of recording within a step.
    last = sorted(points, key=lambda p: p[0])[-1]
    assert (int(found.last_at[at]), True) == (last[0], same(found.last[at], last[1]))
    if odd:
        first = min(odd, key=lambda p: p[0])
        assert (int(found.odd_at[at]), True) == (first[0], same(found.odd[at], first[1]))
    if finite:
        values = [v for _, v in finite]
        assert found.low[at] == min(values)
        assert found.high[at] == max(values)
        assert (int(found.low_at[at]), float(found.low[at])) in finite
        assert (int(found.high_at[at]), float(found.high[at])) in finite
        exact = math.fsum(v / len(values) for v in values)
        scale = max(abs(v) for v in values)
        assert abs(found.mean[at] - exact) <= 1e-12 * scale + 5e-324 * len(values)


@settings(max_examples=60, deadline=None)
@given(BLOCKS)
def test_rollups_are_what_brute_force_finds(batches: list[list[Record]]) -> None:
    block = join(numbered(batches))
    made = {rollup.level: rollup for rollup in rollups.roll_up(block)}
    assert rollups.LEVELS[-1] in made
    assert len({rollup.buckets for rollup in made.values()}) == len(made)
    records = [r for batch in batches for r in batch]
    for level, rollup in made.items():
        rows = np.frombuffer(rollup.row_data, dtype=rollups.BUCKET)
        assert len(rows) == rollup.buckets
        for column, name in enumerate(block.names):
            points = [(r.step, r.values[name]) for r in records if name in r.values]
            buckets = {step // level for step, _ in points}
            place = rollups.place_of(rollup.places, column)
            if place < 0:
                assert len(points) < rollups.MIN_DENSITY * rollup.buckets
                continue
            offset, size = rollups.extent(place, rollup.buckets)
            data = rollup.data[offset : offset + size]
            found = summary.load(
                np.frombuffer(data, summary.STORED), rows["first"], rows["time"], rows["tokens"]
            )
            keys = (rows["first"] // level).tolist()
            assert {key for at, key in enumerate(keys) if found.count[at]} == buckets
            for at, key in enumerate(keys):
                if key in buckets:
                    check_bucket(found, at, [p for p in points if p[0] // level == key])


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 5000))
def test_buckets_are_as_narrow_as_their_number_allows(a: int, b: int, buckets: int) -> None:
    first, last = min(a, b), max(a, b)
    width = rollups.width_for(first, last, buckets)
    assert last // width - first // width + 1 <= buckets
    half = width // 2
    assert width == 1 or last // half - first // half + 1 > buckets


def test_batches_are_read_by_number_where_a_merge_left_them_out_of_order() -> None:
    """The last frame of a batch, before a block that holds that batch's first and all before."""
    numbers = np.array([5, 1, 2, 2, 5])
    rows = codec.Rows(
        np.arange(10, 15), numbers, np.full(5, math.nan), np.full(5, -1, dtype=np.int64)
    )
    present = np.array([[True, True, True, True, False], [False, True, False, True, True]])
    values = np.arange(10.0).reshape(2, 5)
    block = Block(("a", "b"), rows, values, present)
    now = datetime.now(UTC)
    matrix = StoredMatrix(3, 100, 1, 1, 5, now, 5, True, b"", b"", b"")
    read = _by_batch([(matrix, block)], 1, 5)
    assert [(one.seq, one.name, one.steps, one.values) for one in read] == [
        (2, "a", [12, 13], [2.0, 3.0]),
        (2, "b", [13], [8.0]),
        (5, "a", [10], [0.0]),
        (5, "b", [14], [9.0]),
    ]
    assert _by_batch([(matrix, block)], 5, 9) == []
