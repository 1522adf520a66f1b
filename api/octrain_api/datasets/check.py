"""The check of an uploaded data set: `python -m octrain_api.datasets.check`, a process of its own.

It reads one JSON object from its standard input (see `Order`), puts the parts together, compares
size and sha256, reads every record, and prints one JSON object: `{"rows", "problem_count",
"problems"}`. The content is in the store, whole, when it exits with 0.
"""

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from octrain_api.artifacts import store
from octrain_api.datasets.schemas import ROLES
from octrain_api.jobs.checks import check_row

_SHOWN = 100
_MESSAGE = 500
# Longer lines are not records but a wrong file.
_LONGEST_LINE = 64 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Order:
    """What is to be checked: the folder, its parts in order, and what they should come to."""

    url: str
    parts: list[str]
    content: str
    size: int
    sha256: str
    media: str
    format: str
    columns: dict[str, str]


@dataclass
class Findings:
    """What the check found; of many problems the first ones."""

    rows: int = 0
    problem_count: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: int | None, message: str) -> None:
        """Note a problem."""
        self.problem_count += 1
        if len(self.problems) < _SHOWN:
            self.problems.append({"line": line, "message": message[:_MESSAGE]})


def check(order: Order) -> Findings:
    """Put the parts together and read them all."""
    findings = Findings()
    try:
        size, sha256 = _assemble(order)
    except FileNotFoundError:
        findings.add(None, "a stored part is gone from the artifact store; upload the file again")
        return findings
    if (size, sha256) != (order.size, order.sha256):
        findings.add(
            None,
            f"{size} bytes with sha256 {sha256} were received, {order.size} with {order.sha256} "
            "were announced",
        )
        return findings
    with store.open_file(order.url, order.content) as file:
        if order.media == "parquet":
            _check_parquet(file, order, findings)
        else:
            _check_lines(file, order, findings)
    if not findings.rows and not findings.problem_count:
        findings.add(None, "the file holds no records")
    return findings


def _assemble(order: Order) -> tuple[int, str]:
    digest = hashlib.sha256()
    # It grows among the parts, which are removed with whatever a check that was killed has left.
    target = store.NewFile(order.url, order.content, draft=f"parts/.{secrets.token_hex(8)}")
    try:
        for name in order.parts:
            with store.open_file(order.url, name) as part:
                while chunk := part.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
        target.finish()
    except BaseException:
        target.discard()
        raise
    return target.size, digest.hexdigest()


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines, None in place of one that is too long."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if len(line) <= _LONGEST_LINE:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE + 1)
        yield number, None


def _check_lines(file: BinaryIO, order: Order, findings: Findings) -> None:
    for number, line in _lines(file):
        if line is None:
            findings.add(number, f"the line is longer than {_LONGEST_LINE} bytes")
        elif line.strip():
            wrong = _wrong_line(line, order)
            if wrong is not None:
                findings.add(number, wrong)
            findings.rows += 1


def _wrong_line(line: bytes, order: Order) -> str | None:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    if order.media == "text":
        return None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"not acceptable JSON: {error}"
    return check_row({"format": order.format, "columns": order.columns}, row)


def _check_parquet(file: BinaryIO, order: Order, findings: Findings) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = [order.columns[role] for role in ROLES[order.format]]
    try:
        parquet = pq.ParquetFile(file)
        missing = [name for name in wanted if name not in parquet.schema_arrow.names]
        if missing:
            for name in missing:
                findings.add(None, f"the column {name!r} is missing")
            return
        data = {"format": order.format, "columns": order.columns}
        for batch in parquet.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
            for row in batch.to_pylist():
                findings.rows += 1
                wrong = check_row(data, row)
                if wrong is not None:
                    findings.add(findings.rows, wrong)
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.add(None, f"not a Parquet file that can be read: {error}")


def main() -> int:
    """Check what the standard input orders."""
    os.nice(10)
    order = Order(**json.load(sys.stdin))
    print(json.dumps(asdict(check(order))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
