"""Rollups: what is kept of the points of a bucket, so that no single-step spike is lost.

A bucket of width W holds the points whose step // W is its key. Kept are count and non-finite
count, the least and the greatest finite value with their steps, the mean of the finite values, the
value of the last step, and the first non-finite one with its step; of two points of one step the
later recorded is the last. Buckets of width W are summed up to those of a multiple of W by the same
function that makes them of points.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from octrain_api.metrics.codec import Flags, Floats, Integers, Rows

# One bucket as it is stored. Steps are offsets from the bucket's first step.
STORED = np.dtype(
    [
        ("low", "<f8"),
        ("high", "<f8"),
        ("mean", "<f8"),
        ("last", "<f8"),
        ("odd", "<f8"),
        ("count", "<u4"),
        ("non_finite", "<u4"),
        ("low_at", "<u2"),
        ("high_at", "<u2"),
        ("last_at", "<u2"),
        ("odd_at", "<u2"),
    ]
)


@dataclass(frozen=True)
class Summary:
    """Arrays of one shape (..., K): K buckets. What has no point stands for nothing."""

    low: Floats
    high: Floats
    mean: Floats
    last: Floats
    odd: Floats
    count: Integers
    non_finite: Integers
    low_at: Integers
    high_at: Integers
    last_at: Integers
    odd_at: Integers
    # Of the last point: seconds since the epoch (NaN: unknown) and tokens (-1: unknown).
    time: Floats
    tokens: Integers

    def take(self, which: Any) -> "Summary":
        """Some of the buckets, along the last axis."""
        return Summary(*(getattr(self, f.name)[..., which] for f in fields(self)))

    def rows(self, which: Any) -> "Summary":
        """Some of the series, along the first axis."""
        return Summary(*(getattr(self, f.name)[which] for f in fields(self)))


def concatenate(parts: list[Summary]) -> Summary:
    """Along the last axis."""
    return Summary(
        *(np.concatenate([getattr(p, f.name) for p in parts], axis=-1) for f in fields(Summary))
    )


def of_points(values: Floats, present: Flags | None, rows: Rows) -> Summary:
    """Each point as a bucket of its own: values of shape (..., K), of K rows."""
    finite = np.isfinite(values)
    count = np.ones(values.shape, dtype=np.int64)
    if present is not None:
        count = present.astype(np.int64)
        finite &= present
    shape = values.shape
    at = np.broadcast_to(rows.steps, shape)
    zeroed = np.where(finite, values, 0.0)
    return Summary(
        low=values,
        high=values,
        mean=zeroed,
        last=values,
        odd=values,
        count=count,
        non_finite=count - finite,
        low_at=at,
        high_at=at,
        last_at=at,
        odd_at=at,
        time=np.broadcast_to(rows.times, shape),
        tokens=np.broadcast_to(rows.tokens, shape),
    )


def sum_up(parts: Summary, keys: Integers) -> tuple[Integers, Summary]:
    """Sum up the buckets of equal key (K): (B) keys in order, and (..., B) buckets.

    Buckets of one key are given in the order of recording; the keys may come in any order.
    """
    if len(keys) > 1 and np.any(keys[1:] < keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, parts = keys[order], parts.take(order)
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    sizes = np.diff(np.append(starts, len(keys)))
    return keys[starts], _reduce(parts, starts, sizes)


def _reduce(parts: Summary, starts: Integers, sizes: Integers) -> Summary:
    count = np.add.reduceat(parts.count, starts, axis=-1)
    non_finite = np.add.reduceat(parts.non_finite, starts, axis=-1)
    weight = parts.count - parts.non_finite
    finite = weight > 0
    total = np.maximum(count - non_finite, 1)
    shares = parts.mean * (weight / np.repeat(total, sizes, axis=-1))
    index = np.arange(parts.count.shape[-1])
    end = len(index)

    def first(where: Flags) -> Integers:
        found = np.minimum.reduceat(np.where(where, index, end), starts, axis=-1)
        return np.minimum(found, end - 1)

    def pick(array: Any, which: Integers) -> Any:
        return np.take_along_axis(np.asarray(array), which, axis=-1)

    low = np.where(finite, parts.low, np.inf)
    lowest = first(finite & (low == np.repeat(np.minimum.reduceat(low, starts, -1), sizes, -1)))
    high = np.where(finite, parts.high, -np.inf)
    highest = first(finite & (high == np.repeat(np.maximum.reduceat(high, starts, -1), sizes, -1)))
    at = np.where(parts.count > 0, parts.last_at, -1)
    ends = at == np.repeat(np.maximum.reduceat(at, starts, -1), sizes, -1)
    newest = np.maximum.reduceat(np.where(ends, index, 0), starts, axis=-1)
    odd = parts.non_finite > 0
    at = np.where(odd, parts.odd_at, np.iinfo(np.int64).max)
    oddest = first(odd & (at == np.repeat(np.minimum.reduceat(at, starts, -1), sizes, -1)))
    return Summary(
        pick(parts.low, lowest),
        pick(parts.high, highest),
        np.add.reduceat(shares, starts, axis=-1),
        pick(parts.last, newest),
        pick(parts.odd, oddest),
        count,
        non_finite,
        pick(parts.low_at, lowest),
        pick(parts.high_at, highest),
        pick(parts.last_at, newest),
        pick(parts.odd_at, oddest),
        pick(parts.time, newest),
        pick(parts.tokens, newest),
    )


def store(summary: Summary, keys: Integers, width: int) -> bytes:
    """The bytes of (S, B) buckets, one series after another."""
    out = np.zeros(summary.count.shape, dtype=STORED)
    begin = keys * width
    for name in STORED.names or ():
        values = getattr(summary, name)
        if name.endswith("_at"):
            # A step of no point is any step, of any bucket.
            known = {"odd_at": summary.non_finite > 0, "last_at": summary.count > 0}
            values = np.where(known.get(name, summary.count > summary.non_finite), values, begin)
            values = values - begin
        out[name] = values
    return out.tobytes()


def load(stored: Any, begin: Integers, times: Floats, tokens: Integers) -> Summary:
    """Buckets of (..., B) STORED, with the first step, the time and tokens of each B."""
    arrays: dict[str, Any] = {name: stored[name] for name in STORED.names or ()}
    for name in ("count", "non_finite", "low_at", "high_at", "last_at", "odd_at"):
        arrays[name] = arrays[name].astype(np.int64)
        if name.endswith("_at"):
            arrays[name] += begin
    shape = stored.shape
    return Summary(
        **arrays, time=np.broadcast_to(times, shape), tokens=np.broadcast_to(tokens, shape)
    )
