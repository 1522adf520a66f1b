"""Secrets of a job: named in its spec, held by the node's operator, seen by its trainer alone.

The spec's ``secrets`` maps a variable of the trainer's environment to a name. The value of the name
``hub-token`` is in the worker's environment as ``OCTRAIN_SECRET_HUB_TOKEN``; it goes to the trainer
with the order to begin, through a pipe, and into nothing that is written or sent. What a trainer
prints or reports is masked on its way out: every whole occurrence of a value becomes ``***``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8core.errors import TrainingError
from fp8core.spec.outcomes import Reason

__all__ = ["PREFIX", "JobSecrets", "variable_of"]

PREFIX = "OCTRAIN_SECRET_"
_MASK = "***"
# Shorter values occur everywhere by chance; no real secret is so short.
_SHORTEST_MASKED = 4
_CHUNK = 1 << 20


def variable_of(name: str) -> str:
    """The variable of the worker's environment that holds the secret of this name."""
    return PREFIX + name.upper().replace("-", "_")


class JobSecrets:
    """The secrets that one spec names, as far as this node has them."""

    def __init__(self, spec: Mapping[str, Any], source: Mapping[str, str] | None = None) -> None:
        source = os.environ if source is None else source
        wanted: Mapping[str, str] = spec.get("secrets") or {}
        self._missing = {
            name: variable_of(name) for name in wanted.values() if not source.get(variable_of(name))
        }
        self._values = {
            variable: source[variable_of(name)]
            for variable, name in wanted.items()
            if name not in self._missing
        }
        long_first = sorted(set(self._values.values()), key=len, reverse=True)
        self._masked = [value for value in long_first if len(value) >= _SHORTEST_MASKED]

    def __repr__(self) -> str:
        return f"JobSecrets({', '.join(sorted(self._values))})"

    def check(self) -> None:
        """Raises ``TrainingError`` when this node lacks one of them."""
        if self._missing:
            names = "; ".join(f"{name!r} ({place})" for name, place in self._missing.items())
            raise TrainingError(
                f"this node has no secret {names}: its operator sets the variable of the worker",
                reason=Reason.SPEC_INVALID,
                pointer="/secrets",
            )

    def environment(self) -> dict[str, str]:
        """What the trainer's environment gets."""
        return dict(self._values)

    def mask(self, text: str) -> str:
        """The text without the values."""
        for value in self._masked:
            text = text.replace(value, _MASK)
        return text

    def mask_json(self, line: bytes) -> bytes:
        """The same of a line of JSON, in which a value may be written with escapes."""
        for value in self._masked:
            for written in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
                line = line.replace(written[1:-1].encode(), _MASK.encode())
        return line

    def masked_file(self, path: Path, folder: Path) -> Path:
        """The file itself when it holds none of the values, else a copy without them in ``folder``.

        Raises ``OSError`` when it cannot be read, or there is no room for the copy.
        """
        if not self._masked or not self._occurs_in(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"masked-{path.name}"
        with (
            path.open("r", encoding="utf-8", errors="surrogateescape", newline="") as source,
            target.open("w", encoding="utf-8", errors="surrogateescape", newline="") as copy,
        ):
            for line in source:
                copy.write(self.mask(line))
        final = folder / path.name
        target.replace(final)
        return final

    def _occurs_in(self, path: Path) -> bool:
        values = [value.encode() for value in self._masked]
        overlap = max(map(len, values)) - 1
        with path.open("rb") as file:
            kept = b""
            while chunk := file.read(_CHUNK):
                data = kept + chunk
                if any(value in data for value in values):
                    return True
                kept = data[-overlap:] if overlap else b""
        return False
