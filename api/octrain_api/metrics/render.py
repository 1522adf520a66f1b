"""Series as JSON, CSV and Arrow."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic_core import to_json

from octrain_api.metrics.lines import Line
from octrain_api.problems import Problem

Axis = Literal["step", "time", "tokens"]
# Elements that are spelt in one go.
_PIECE = 10_000
CSV_TYPE = "text/csv; charset=utf-8"
ARROW_TYPE = "application/vnd.apache.arrow.stream"


def json_of(value: Any) -> bytes:
    """JSON whose NaN and infinities are strings."""
    return to_json(value, inf_nan_mode="strings")


def json_answer(
    lines: Sequence[Line], buckets: bool, axis: Axis, rest: dict[str, Any]
) -> Iterator[bytes]:
    """The series as a JSON object, and what else is to be in it.

    Piece by piece: nobody else is served while a piece is spelt, in whatever thread.
    """
    yield b'{"series":['
    for n, line in enumerate(lines):
        head = {"job_id": line.job_id, "name": line.name, "attempt": line.attempt}
        yield (b"," if n else b"") + json_of(head)[:-1]
        if buckets:
            yield b',"width":%d,"buckets":{' % line.width
            for place, (name, column) in enumerate(buckets_of(line).items()):
                yield (b'],"%b":[' if place else b'"%b":[') % name.encode()
                yield from _spelt_out(column)
            yield b"]}}"
        else:
            yield b',"points":['
            yield from _spelt_out(_points(line, axis))
            yield b"]}"
    yield b"]"
    for name, value in rest.items():
        yield b',"%b":%b' % (name.encode(), json_of(value))
    yield b"}"


def _spelt_out(values: Sequence[Any]) -> Iterator[bytes]:
    """The elements of a JSON array, without its brackets."""
    for start in range(0, len(values), _PIECE):
        yield (b"," if start else b"") + json_of(values[start : start + _PIECE])[1:-1]


class _Pairs(Sequence[Any]):
    """[x, value] of points; made when they are asked for, a slice at a time."""

    def __init__(self, x: Any, values: Any, known: bool) -> None:
        self._x, self._values, self._known = x, values, known

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: Any) -> Any:
        x = self._x[part]
        return list(
            zip(x.tolist() if self._known else _known(x), self._values[part].tolist(), strict=True)
        )


def _points(line: Line, axis: Axis) -> _Pairs:
    """Every point; where the line is of buckets, the least, greatest (or first non-finite) and last
    point of each, which lose no spike.
    """
    whole = line.summary
    if line.exact:
        x = line.steps if axis == "step" else getattr(whole, axis)
        values = whole.last
    else:
        x, values = _thinned(line, axis)
    return _Pairs(x, values, axis == "step")


def _thinned(line: Line, axis: Axis) -> tuple[Any, Any]:
    s = line.summary
    finite = s.count > s.non_finite
    odd = s.non_finite > 0
    steps = np.stack(
        [np.where(finite, s.low_at, -1), np.where(odd, s.odd_at, s.high_at), s.last_at]
    )
    values = np.stack([s.low, np.where(odd, s.odd, s.high), s.last])
    # The order inside each bucket; of two that are one point, one is dropped.
    order = np.argsort(steps, axis=0, kind="stable")
    steps, values = np.take_along_axis(steps, order, 0), np.take_along_axis(values, order, 0)
    keep = steps >= 0
    keep[1:] &= steps[1:] != steps[:-1]
    # The last of a bucket is kept among those of its step, being what a step came to.
    newest = steps == s.last_at
    values = np.where(newest, s.last, values)
    x = steps if axis == "step" else np.broadcast_to(getattr(s, axis), steps.shape)
    return x.T[keep.T], values.T[keep.T]


def _known(values: Any) -> list[Any]:
    """Times or tokens; null where they are unknown."""
    known = values >= 0  # not of NaN
    if known.all():
        return list(values.tolist())
    return [x if is_known else None for x, is_known in zip(values.tolist(), known, strict=True)]


def buckets_of(line: Line) -> dict[str, Any]:
    """Columns of the buckets; null where a bucket has no finite value."""
    s = line.summary
    finite = s.count > s.non_finite

    def of_finite(values: Any) -> list[Any]:
        if finite.all():
            return list(values.tolist())
        return [
            v if is_finite else None for v, is_finite in zip(values.tolist(), finite, strict=True)
        ]

    return {
        "first_step": line.steps.tolist(),
        "min": of_finite(s.low),
        "max": of_finite(s.high),
        "mean": of_finite(s.mean),
        "last": s.last.tolist(),
        "last_step": s.last_at.tolist(),
        "min_step": of_finite(s.low_at),
        "max_step": of_finite(s.high_at),
        "count": s.count.tolist(),
        "non_finite": s.non_finite.tolist(),
        "time": _known(s.time),
        "tokens": _known(s.tokens),
    }


_POINT_COLUMNS = ("job_id", "name", "attempt", "step", "value", "time", "tokens")
_BUCKET_COLUMNS = (
    *("job_id", "name", "attempt", "width", "first_step", "min", "max", "mean", "last"),
    *("last_step", "min_step", "max_step", "count", "non_finite", "time", "tokens"),
)


def _table(lines: Sequence[Line], buckets: bool) -> Iterator[tuple[Line, dict[str, list[Any]]]]:
    """Of each line its columns."""
    for line in lines:
        if buckets:
            yield line, buckets_of(line)
        elif line.exact:
            s = line.summary
            yield (
                line,
                {
                    "step": line.steps.tolist(),
                    "value": s.last.tolist(),
                    "time": _known(s.time),
                    "tokens": _known(s.tokens),
                },
            )
        else:
            steps, values = _thinned(line, "step")
            gaps = [None] * len(steps)
            yield (
                line,
                {"step": steps.tolist(), "value": values.tolist(), "time": gaps, "tokens": gaps},
            )


def csv_of(lines: Sequence[Line], buckets: bool) -> bytes:
    """One row a point or bucket, with a header; NaN, Infinity and -Infinity are spelt so."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_BUCKET_COLUMNS if buckets else _POINT_COLUMNS)
    for line, columns in _table(lines, buckets):
        front = [line.job_id, line.name, line.attempt, *([line.width] if buckets else [])]
        for row in zip(*columns.values(), strict=True):
            writer.writerow(front + [_spelt(value) for value in row])
    return out.getvalue().encode()


def _spelt(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
    return value


def arrow_of(lines: Sequence[Line], buckets: bool) -> bytes:
    """An Arrow IPC stream of the same table. Errors: Problem 406 without pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise Problem(
            406,
            "not-acceptable",
            "Not acceptable",
            "This server has no pyarrow, which Arrow answers need: install octrain[arrow], or ask "
            "for JSON or CSV.",
        ) from error
    whole: dict[str, list[Any]] = {}
    front: dict[str, list[Any]] = {"job_id": [], "name": [], "attempt": []}
    for line, columns in _table(lines, buckets):
        count = len(next(iter(columns.values())))
        for name, value in (
            ("job_id", line.job_id),
            ("name", line.name),
            ("attempt", line.attempt),
        ):
            front[name] += [value] * count
        if buckets:
            front.setdefault("width", []).extend([line.width] * count)
        for name, values in columns.items():
            whole.setdefault(name, []).extend(values)
    text, number, real = pa.string(), pa.int64(), pa.float64()
    kinds = {
        "job_id": text,
        "name": text,
        **dict.fromkeys(("value", "min", "max", "mean", "last", "time"), real),
    }
    wanted = {**front, **whole}
    for name in _BUCKET_COLUMNS if buckets else _POINT_COLUMNS:
        wanted.setdefault(name, [])
    arrays = {name: pa.array(values, kinds.get(name, number)) for name, values in wanted.items()}
    table = pa.table(arrays)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
