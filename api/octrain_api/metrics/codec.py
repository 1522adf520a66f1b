"""Bytes of metric blocks: columns of float64 in compressed bands, and what the rows share.

A block is a matrix: one row for each recorded step, one column for each series. Columns lie one
after another, grouped into bands that are compressed apart, so that one series is read without the
others. In a band the bytes of its values are shuffled (all first bytes, then all second ones, ...)
before zlib: neighbours are alike then, and the zero bytes of values that are exact in float32
vanish. Where some cells are empty, a band begins with one bit a cell.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Uncompressed bytes of a band, unless one column alone is larger.
BAND_BYTES = 1 << 16
UNKNOWN_TOKENS = -1
_LEVEL = 1
_DIRECTORY = np.dtype([("columns", "<u4"), ("size", "<u4")])


class Malformed(ValueError):
    """The bytes are not what their description says."""


@dataclass(frozen=True)
class Rows:
    """What the columns of a block share, for each of R rows in the order of recording."""

    steps: Integers
    # The number of the batch in the job's stream.
    seqs: Integers
    # Seconds since the epoch; NaN where unknown.
    times: Floats
    # Tokens trained on by then; -1 where unknown.
    tokens: Integers

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, part: Any) -> "Rows":
        return Rows(self.steps[part], self.seqs[part], self.times[part], self.tokens[part])


@dataclass(frozen=True)
class Band:
    """Neighbouring columns that are compressed together, and their compressed size in bytes."""

    columns: int
    size: int


def shuffle(values: Floats) -> bytes:
    """The bytes of N values, all first bytes before all second ones."""
    plain = np.ascontiguousarray(values, dtype="<f8").view(np.uint8)
    return plain.reshape(-1, 8).T.tobytes()


def unshuffle(data: bytes | memoryview) -> Floats:
    """The inverse of `shuffle`."""
    planes = np.frombuffer(data, dtype=np.uint8).reshape(8, -1)
    return np.ascontiguousarray(planes.T).view("<f8").reshape(-1)


def band_columns(rows: int) -> int:
    """How many columns of so many rows make a band."""
    return max(BAND_BYTES // max(rows * 8, 1), 1)


def pack_columns(values: Floats, present: Flags | None) -> tuple[list[Band], bytes]:
    """Bands of a matrix of shape (columns, rows); `present` None where every cell is filled."""
    columns, rows = values.shape
    size = band_columns(rows)
    bands: list[Band] = []
    parts: list[bytes] = []
    for start in range(0, columns, size):
        part = values[start : start + size]
        if present is None:
            plain = shuffle(part.reshape(-1))
        else:
            filled = present[start : start + size]
            bits = np.packbits(filled, axis=1, bitorder="little").tobytes()
            plain = bits + shuffle(part[filled])
        data = zlib.compress(plain, _LEVEL)
        bands.append(Band(len(part), len(data)))
        parts.append(data)
    return bands, b"".join(parts)


def unpack_band(
    data: bytes | memoryview, columns: int, rows: int, masked: bool
) -> tuple[Floats, Flags | None]:
    """Values (columns, rows), and which cells are filled (None: all). Errors: Malformed."""
    bits = columns * -(-rows // 8) if masked else 0
    plain = inflate(data, bits + columns * rows * 8)
    if not masked:
        if len(plain) != columns * rows * 8:
            raise Malformed(f"a band of {columns} x {rows} values has {len(plain)} bytes")
        return unshuffle(plain).reshape(columns, rows), None
    if len(plain) < bits:
        raise Malformed(f"a band of {columns} x {rows} cells has {len(plain)} bytes")
    packed = np.frombuffer(plain, dtype=np.uint8, count=bits).reshape(columns, -1)
    present = np.unpackbits(packed, axis=1, count=rows, bitorder="little").view(np.bool_)
    found = (len(plain) - bits) / 8
    if found != np.count_nonzero(present):
        raise Malformed(f"a band says that {np.count_nonzero(present)} cells are filled: {found}")
    values = np.zeros((columns, rows))
    values[present] = unshuffle(memoryview(plain)[bits:])
    return values, present


def inflate(data: bytes | memoryview, limit: int) -> bytes:
    """Decompress to at most `limit` bytes. Errors: Malformed, before more than that is made."""
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data, limit + 1)
    except zlib.error as error:
        raise Malformed(f"compressed bytes do not decompress: {error}") from error
    if len(plain) > limit:
        raise Malformed(f"compressed bytes hold more than the {limit} bytes that they may")
    if not machine.eof or machine.unused_data:
        raise Malformed("compressed bytes do not end where they are said to end")
    return plain


def pack_rows(rows: Rows) -> bytes:
    """The rows as compressed bytes: steps, batch numbers and tokens as differences."""
    parts = [np.diff(part, prepend=0) for part in (rows.steps, rows.seqs, rows.tokens)]
    plain = b"".join(shuffle(part.view(np.float64)) for part in parts) + shuffle(rows.times)
    return zlib.compress(plain, _LEVEL)


def unpack_rows(data: bytes, count: int) -> Rows:
    """The inverse of `pack_rows`."""
    plain = memoryview(inflate(data, count * 32))
    size = count * 8
    steps, seqs, tokens = (
        np.cumsum(unshuffle(plain[n * size : (n + 1) * size]).view(np.int64)) for n in range(3)
    )
    return Rows(steps, seqs, unshuffle(plain[3 * size :]), tokens)


def pack_directory(bands: Sequence[Band]) -> bytes:
    """Columns and compressed bytes of each band."""
    return np.array([(b.columns, b.size) for b in bands], dtype=_DIRECTORY).tobytes()


class Directory:
    """Where the bands of a block lie."""

    def __init__(self, data: bytes) -> None:
        entries = np.frombuffer(data, dtype=_DIRECTORY)
        self._first = np.concatenate(([0], np.cumsum(entries["columns"], dtype=np.int64)))
        self._begin = np.concatenate(([0], np.cumsum(entries["size"], dtype=np.int64)))

    def bands_of(self, columns: Integers) -> Integers:
        """The band of each column."""
        return np.searchsorted(self._first, columns, side="right") - 1

    def place(self, band: int) -> tuple[int, int]:
        """Offset and length of a band in the block's data, in bytes."""
        return int(self._begin[band]), int(self._begin[band + 1] - self._begin[band])

    def columns(self, band: int) -> range:
        """The columns of a band."""
        return range(int(self._first[band]), int(self._first[band + 1]))

    def __len__(self) -> int:
        return len(self._first) - 1
