"""The bodies in which supervisors send telemetry: JSON, or packed with the metrics in columns.

A packed body has the content type `application/vnd.octrain.telemetry.v1`:

    b"OCT1" | length of the head, 4 bytes, little-endian | head: JSON, zlib | data of the frames

The head holds `fencing_token`, `first_seq`, `count`, `records` ([offset, record] for what is not in
a frame) and `frames`. A record's number is `first_seq` + its offset; every offset below `count`
occurs once. A frame is a matrix of the values of one or more records: `names` (the columns),
`offsets` and `steps` (the rows), `times` (seconds since the epoch, or null), `tokens` (trained on
by then, or null), `masked` (whether cells are empty), and `bands` ([columns, bytes] each), whose
bytes follow the head in the order of the frames: see octrain_api.metrics.codec for what is in them.
No name stands in two frames.

Whatever is said of sizes is checked before anything of that size is made.
"""

import asyncio
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, ValidationError

from octrain_api.attempts.schemas import TelemetryRequest
from octrain_api.dependencies import ContextDep
from octrain_api.json_bounds import too_complex
from octrain_api.metrics.blocks import Block, Packed, unpack
from octrain_api.metrics.codec import UNKNOWN_TOKENS, Band, Malformed, Rows, inflate
from octrain_api.numbers import clean_text
from octrain_api.problems import Problem, ProblemError
from octrain_api.settings import HttpSettings

CONTENT_TYPE = "application/vnd.octrain.telemetry.v1"
MAGIC = b"OCT1"
MAX_RECORDS = 20_000
MAX_COLUMNS = 20_000
MAX_CELLS = 4_000_000
MAX_STEP = 2**62
_MAX_NAME = 512
_LENGTH = struct.Struct("<I")
Integer = Annotated[int, Strict()]


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fencing_token: Integer = Field(ge=0, le=2**62)
    first_seq: Integer = Field(ge=1, le=MAX_STEP)
    count: Integer = Field(ge=0, le=MAX_RECORDS)
    records: list[tuple[Integer, dict[str, Any]]] = Field(max_length=MAX_RECORDS)
    frames: list["_Frame"] = Field(max_length=1000)


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid")

    names: list[str] = Field(min_length=1, max_length=MAX_COLUMNS)
    offsets: list[Integer] = Field(min_length=1, max_length=MAX_RECORDS)
    steps: list[Integer] = Field(max_length=MAX_RECORDS)
    times: list[float | None] = Field(max_length=MAX_RECORDS)
    tokens: list[Integer | None] = Field(max_length=MAX_RECORDS)
    masked: StrictBool
    bands: list[tuple[Integer, Integer]] = Field(max_length=MAX_COLUMNS)


@dataclass(frozen=True)
class Frame:
    """Metrics of some records of a batch: the block, and the offset of each of its rows."""

    offsets: Sequence[int]
    block: Block
    # As it came, where no row of it was stored before.
    packed: Packed


@dataclass(frozen=True)
class Batch:
    """Records `first_seq` ... `first_seq + count - 1`: those of metrics in frames, or not."""

    fencing_token: int
    first_seq: int
    count: int
    records: Sequence[tuple[int, dict[str, Any]]]
    frames: Sequence[Frame] = field(default_factory=list)

    def after(self, skipped: int) -> "Batch":
        """Without the first `skipped` records, which are stored already."""
        if skipped <= 0:
            return self
        frames = []
        for frame in self.frames:
            first = int(np.searchsorted(frame.offsets, skipped))
            if first == 0:
                rest: Block | None = frame.block
                packed = frame.packed
            else:
                rest = frame.block.after_row(first)
                if rest is None:
                    continue
                packed = rest.pack()
            assert rest is not None
            offsets = [offset - skipped for offset in frame.offsets[first:]]
            frames.append(Frame(offsets, rest, packed))
        return Batch(
            self.fencing_token,
            self.first_seq + skipped,
            max(self.count - skipped, 0),
            [(offset - skipped, record) for offset, record in self.records if offset >= skipped],
            frames,
        )


def of_request(request: TelemetryRequest) -> Batch:
    """The batch of a JSON body."""
    records = list(enumerate(request.records))
    return Batch(request.fencing_token, request.first_seq, len(records), records)


def parse(body: bytes, settings: HttpSettings) -> Batch:
    """The batch of a packed body; Problem 422 for anything that is none.

    The settings' bounds of a JSON body are those of the head once it is decompressed.
    """
    try:
        return _parse(body, settings)
    except Malformed as error:
        message = str(error)
        raise _invalid("", message) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid("/head/" + "/".join(map(str, first["loc"])), first["msg"]) from error


def _invalid(pointer: str, message: str) -> Problem:
    return Problem(
        422,
        "request-invalid",
        "Request not valid",
        f"The packed telemetry is not valid: {message}",
        errors=[ProblemError(pointer=pointer, message=message, code="telemetry")],
    )


def _parse(body: bytes, settings: HttpSettings) -> Batch:
    begin = len(MAGIC) + _LENGTH.size
    if len(body) < begin or body[: len(MAGIC)] != MAGIC:
        raise Malformed(f"the body does not begin with {MAGIC!r} and the length of its head")
    (length,) = _LENGTH.unpack_from(body, len(MAGIC))
    if length > len(body) - begin:
        raise Malformed(
            f"the head has {length} bytes, the body {len(body) - begin} after its start"
        )
    plain = inflate(memoryview(body)[begin : begin + length], settings.max_body_bytes)
    why = too_complex(plain, max_depth=settings.max_json_depth, max_values=settings.max_json_values)
    if why is not None:
        raise Malformed(f"the head is not read: {why}")
    try:
        raw = json.loads(plain)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the head is not JSON: {error}") from error
    head = _Head.model_validate(raw)
    _check_offsets(head)
    _check_sizes(head, len(body) - begin - length)
    frames = []
    begin += length
    for number, frame in enumerate(head.frames):
        size = sum(size for _, size in frame.bands)
        try:
            frames.append(_unpack(frame, body[begin : begin + size]))
        except (Malformed, OverflowError) as error:
            raise Malformed(f"frame {number}: {error}") from error
        begin += size
    return Batch(head.fencing_token, head.first_seq, head.count, head.records, frames)


def _check_offsets(head: _Head) -> None:
    offsets = [offset for offset, _ in head.records]
    for frame in head.frames:
        offsets += frame.offsets
        if any(a >= b for a, b in zip(frame.offsets, frame.offsets[1:], strict=False)):
            raise Malformed("the offsets of a frame do not rise")
    if sorted(offsets) != list(range(head.count)):
        raise Malformed(f"the offsets are not those from 0 to {head.count - 1}, each once")


def _check_sizes(head: _Head, data_bytes: int) -> None:
    cells = 0
    names: set[str] = set()
    total = 0
    for frame in head.frames:
        rows = len(frame.offsets)
        total += len(frame.names)
        names.update(frame.names)
        if not len(frame.steps) == len(frame.times) == len(frame.tokens) == rows:
            raise Malformed("offsets, steps, times and tokens of a frame differ in length")
        if min(map(len, frame.names)) < 1 or max(map(len, frame.names)) > _MAX_NAME:
            raise Malformed(f"a name has 1 to {_MAX_NAME} characters")
        if min(frame.steps) < 0 or max(frame.steps) > MAX_STEP:
            raise Malformed(f"a step is a number from 0 to {MAX_STEP}")
        if min(b for pair in frame.bands for b in pair) < 1 if frame.bands else True:
            raise Malformed("a band has at least one column and one byte")
        if sum(columns for columns, _ in frame.bands) != len(frame.names):
            raise Malformed("the bands of a frame have other columns than the frame has names")
        data_bytes -= sum(size for _, size in frame.bands)
        cells += rows * len(frame.names)
    if len(names) != total:
        raise Malformed("a name stands in two columns")
    if total > MAX_COLUMNS:
        raise Malformed(f"{total} columns: at most {MAX_COLUMNS} are taken at once")
    if cells > MAX_CELLS:
        raise Malformed(f"{cells} cells: at most {MAX_CELLS} are taken at once")
    if data_bytes != 0:
        raise Malformed("the bands of the frames do not fill the rest of the body")


def _unpack(frame: _Frame, data: bytes) -> Frame:
    names = tuple(clean_text(name) for name in frame.names)
    if len(set(names)) != len(names):
        raise Malformed("two names differ only in characters that cannot be stored")
    rows = Rows(
        np.array(frame.steps, dtype=np.int64),
        np.zeros(len(frame.steps), dtype=np.int64),
        np.array(frame.times, dtype=np.float64),
        np.array([UNKNOWN_TOKENS if t is None else t for t in frame.tokens], dtype=np.int64),
    )
    bands = [Band(columns, size) for columns, size in frame.bands]
    packed = Packed(names, rows, frame.masked, bands, data)
    block = unpack(packed)
    if block.present is not None and not block.present.any(axis=1).all():
        raise Malformed("a column is empty")
    return Frame(frame.offsets, block, packed)


async def read_body(request: Request, context: ContextDep) -> Batch:
    """What an endpoint asks for to get the batch, whichever of the two forms it came in."""
    body = await request.body()
    if request.headers.get("content-type", "").partition(";")[0].strip() == CONTENT_TYPE:
        # Decompressing lets other requests run meanwhile.
        return await asyncio.to_thread(parse, body, context.settings.http)
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        problem = {"type": "json_invalid", "loc": ("body",), "msg": f"not JSON: {error}"}
        raise RequestValidationError([problem]) from error
    try:
        parsed = TelemetryRequest.model_validate(raw)
    except ValidationError as error:
        errors = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(errors) from error
    return of_request(parsed)


TelemetryBody = Annotated[Batch, Depends(read_body)]
TELEMETRY_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": TelemetryRequest.model_json_schema(),
                "example": {
                    "fencing_token": 7,
                    "first_seq": 1,
                    "records": [
                        {"type": "metrics", "time": 1.5, "step": 1, "values": {"train/loss": 5.5}}
                    ],
                },
            },
            CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
