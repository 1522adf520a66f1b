"""The spec that a command is about, read from its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8core.errors import SpecRefused
from fp8core.spec import JobSpec, parse_spec

__all__ = ["SpecFile", "read_spec_file"]

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class SpecFile:
    """A spec and where its paths are looked up."""

    spec: JobSpec
    roots: tuple[Path, ...]
    base: Path
    """The folder of the spec's file: without roots, relative paths start here."""


def read_spec_file(path: Path, roots: list[Path]) -> SpecFile:
    """Raises ``SpecInvalid`` with every problem, ``SpecRefused`` for a file that is none."""
    for root in roots:
        if not root.is_dir():
            raise SpecRefused(f"the root {root} is no folder")
    try:
        if not path.is_file():
            path.stat()  # says whether it is missing or out of reach
            raise SpecRefused(f"cannot read the spec {path}: it is not a file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecRefused(f"cannot read the spec {path}: {reason}") from error
    if len(content) > _MAX_BYTES:
        raise SpecRefused(f"the spec {path} is larger than {_MAX_BYTES} bytes")
    return SpecFile(parse_spec(content), tuple(roots), path.absolute().parent)
