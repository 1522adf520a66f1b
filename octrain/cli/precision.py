"""The precision table of a job for a person: formats of compute, formats and bytes of storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from octrain.cli.render import size, table

__all__ = ["precision_table"]

_COUNTED = {
    "communication": "communication",
    "weights": "weights",
    "master_weights": "master weights",
    "weight_gradients": "weight gradients",
    "optimizer_states": "optimizer states",
}


def precision_table(measured: Mapping[str, Any]) -> Table:
    """``measured``: the answer of ``/jobs/{id}/precision``. Of a newer server's table the rows
    that are not known here are left out; ``--json`` has all.
    """
    rows = measured.get("rows", {})
    shown = table("COMPUTED OR STORED", "WHERE", "FORMATS", ">BYTES")
    for cells in (*_gemms(rows), *_attention(rows), *_counted(measured, rows)):
        shown.add_row(*(escape(cell) for cell in cells))
    return shown


def _gemms(rows: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind in rows.get("gemm_compute", {}).get("layers", ()):
        where = f"{kind['layers']} {kind['kind']}, as {kind['example']}"
        for gemm in kind["gemms"]:
            operands = gemm["operands"].items()
            formats = " × ".join(f"{name} {one['format']}" for name, one in operands)
            yield f"GEMM {gemm['gemm']}", where, formats, "-"
            where = ""


def _attention(rows: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for one in rows.get("attention_compute", {}).get("passes", ()):
        calls = f"{one['calls']} {'call' if one['calls'] == 1 else 'calls'}"
        yield f"attention {one['pass']}", calls, one["format"], "-"


def _counted(measured: Mapping[str, Any], rows: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, label in _COUNTED.items():
        if name in rows:
            ranks = rows[name].get("ranks")
            where = "" if ranks is None else f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
            yield label, where, _formats(rows[name]), size(rows[name].get("bytes"))
    state = measured.get("engine_state") or {}
    if state.get("bytes"):
        yield (
            "histories, scales",
            str(measured.get("engine", "")),
            _formats(state),
            size(state["bytes"]),
        )


def _formats(row: Mapping[str, Any]) -> str:
    formats = row.get("formats", {})
    if len(formats) < 2:
        return ", ".join(formats) or "none"
    return ", ".join(f"{name} {size(one['bytes'])}" for name, one in formats.items())
