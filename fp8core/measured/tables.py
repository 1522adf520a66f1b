"""The files of measured figures, found by the name of the card that they were measured on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

__all__ = ["FOLDER", "TableKind", "cards", "find_table"]

FOLDER = Path(__file__).parent

TableKind = Literal["layers", "models"]


def find_table(kind: TableKind, card: str) -> dict[str, Any] | None:
    """The table of this kind that was measured on ``card``, a GPU's name as the driver has it."""
    return next((table for table in _tables(kind) if table["card"] == card), None)


def cards(kind: TableKind) -> list[str]:
    """The cards of which there is a table of this kind."""
    return [table["card"] for table in _tables(kind)]


def _tables(kind: TableKind) -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob(f"*.{kind}.json")):
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        yield table
