"""From which size of a model on FP8 trains faster than bf16 on this card: whole steps, by size.

    python benchmarks/crossover.py --sizes 125m,1b [--rows fused_head,octrain_bf16,bf16]
        [--steps 8] [--warm-up 6] [--precision bf16] [--out fp8core/measured/NAME.json] [--dry-run]
    python benchmarks/crossover.py --table FILE.json

Rows and settings are those of ``train_peers.py`` (2 x 4096 tokens of real text a step), here all in
one process, one after another, so that a row costs little beside its steps. Results are added to
``--out``, where those of other sizes stay: sizes can be measured on different days. ``--table``
prints such a file as Markdown. The file is what ``plan`` and ``/jobs:validate`` quote.
``--dry-run`` goes the same ways on a CPU, tiny, te's rows by `emulated`; its times mean nothing.
Exits with 1 where a row failed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.row_names import ROW_NAMES
from peers.shapes import SHAPES
from row_files import write_rows
from train_peers import DRY, run_row

DEFAULT_ROWS = "fused_head,octrain_bf16,bf16"
FP8_ROWS = ("fused_fp8_attention", "fused_head", "fused", "plain")
BF16_ROWS = ("octrain_bf16", "octrain_bf16_plain", "bf16")


def measure(size: str, row: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One row of one size, its memory given back behind it."""
    import torch

    wanted = argparse.Namespace(**{**vars(chosen), "shape": size, "row": row, "profile": False})
    began = time.perf_counter()
    try:
        found = run_row(wanted)
    except torch.OutOfMemoryError as error:
        found = {"row": row, "error": str(error).splitlines()[0]}
    # The rows that are left are worth measuring all the same.
    except Exception:
        found = {"row": row, "error": traceback.format_exc(limit=-3)}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {**found, "size": size, "seconds": round(time.perf_counter() - began, 1)}


def kept(found: dict[str, Any], chosen: argparse.Namespace, date: str) -> dict[str, Any]:
    """What the table has of a row."""
    return {
        "size": found["size"],
        "parameters": SHAPES[found["size"]].parameters,
        "precision": chosen.precision,
        "row": found["row"],
        "tokens_per_second": round(found["tokens_per_second"]),
        "spread": round(found["spread"], 3),
        "peak_gib": None if found["peak_gib"] is None else round(found["peak_gib"], 1),
        "host_milliseconds": round(found["host_milliseconds"], 1),
        "milliseconds": round(found["milliseconds"], 1),
        "date": date,
        **({"graphed": True} if found["graphed"] else {}),
    }


def merged(
    path: Path, facts: dict[str, Any], rows: list[dict[str, Any]], sizes: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``facts`` with the file's commands too, and the file's rows with ``rows`` in the place of
    those of the same size, row and precision."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["size"], row["precision"], row["row"]

    found: dict[str, Any] = {"commands": [], "rows": []}
    if path.exists():
        found = json.loads(path.read_text())
        for name in ("card", "tokens", "length"):
            if found[name] != facts[name]:
                raise SystemExit(f"{path} is of {name} {found[name]}, and this is {facts[name]}")
    commands = list(dict.fromkeys([*found["commands"], *facts["commands"]]))
    together = {key(row): row for row in [*found["rows"], *rows]}
    ordered = sorted(together.values(), key=lambda row: (sizes.index(row["size"]), key(row)))
    return {**facts, "commands": commands}, ordered


def markdown(table: dict[str, Any]) -> str:
    """By size: the best of bf16, and each row of FP8 as a ratio to it."""
    rows = table["rows"]
    shown = [row for row in FP8_ROWS if any(found["row"] == row for found in rows)]
    lines = [
        f"| size | parameters | best in bf16, tokens/s | {' | '.join(shown)} |",
        "|---|---|---|" + "---|" * len(shown),
    ]
    for size in dict.fromkeys(found["size"] for found in rows):
        speeds = {f["row"]: f["tokens_per_second"] for f in rows if f["size"] == size}
        best = max((speeds[row] for row in BF16_ROWS if row in speeds), default=None)
        if best is None:
            continue
        ratios = [f"{speeds[row] / best:.2f}" if row in speeds else "" for row in shown]
        lines.append(f"| {size} | {SHAPES[size].parameters:,} | {best:,} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="125m,1b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="names of rows of train_peers")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print this file and measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.table is not None:
        print(markdown(json.loads(chosen.table.read_text())))
        return
    if chosen.dry_run:
        vars(chosen).update(DRY, sizes=DRY["shape"])
    sizes, names = chosen.sizes.split(","), chosen.rows.split(",")
    for kind, asked, known in (("size", sizes, SHAPES), ("row", names, ROW_NAMES)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"{unknown[0]} is no {kind}; there are {', '.join(known)}")
    import torch

    versions, card = {"torch": str(torch.__version__)}, platform.machine()
    if not chosen.dry_run:
        import transformer_engine

        card = torch.cuda.get_device_name()
        versions["transformer_engine"] = str(transformer_engine.__version__)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = {
        "format": 1,
        "card": card,
        "commands": [shlex.join(["python", "benchmarks/crossover.py", *sys.argv[1:]])],
        "versions": versions,
        "tokens": chosen.batch * chosen.length,
        "length": chosen.length,
    }
    rows = []
    for size in sizes:
        for row in names:
            found = measure(size, row, chosen)
            if "error" in found:
                print(f"{size} {row} failed: {found['error']}", flush=True)
                continue
            rows.append(kept(found, chosen, date))
            print(f"{json.dumps(rows[-1])} in {found['seconds']} s", flush=True)
            if chosen.out is not None:
                write_rows(chosen.out, *merged(chosen.out, facts, rows, tuple(SHAPES)))
    if rows:
        print(markdown({**facts, "rows": rows}))
    if len(rows) < len(sizes) * len(names):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
