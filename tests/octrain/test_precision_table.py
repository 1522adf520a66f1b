"""How `octrain show --precision` tells a job's measured formats."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from octrain.cli.precision import precision_table

FP8, BF16 = {"format": "fp8_e4m3", "bytes_per_element": 1}, {"format": "bf16"}


def lines(measured: dict[str, Any]) -> list[str]:
    """Each line, one blank between two words."""
    console = Console(width=200, file=io.StringIO())
    console.print(precision_table(measured))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def kind(name: str, layers: int, operand: dict[str, Any]) -> dict[str, Any]:
    gemms = [{"gemm": gemm, "operands": {"input": operand, "weight": BF16}} for gemm in ("f", "d")]
    return {"kind": name, "layers": layers, "example": "a.[red]b", "gemms": gemms}


def test_formats_of_compute_and_storage() -> None:
    stored = {"formats": {"fp32": {"bytes": 1024}, "bf16": {"bytes": 3}}, "bytes": 1027}
    rows = {
        "gemm_compute": {"layers": [kind("Linear", 14, FP8), kind("Conv1D", 1, BF16)]},
        "attention_compute": {"passes": [{"pass": "forward", "format": "fp8_e4m3", "calls": 2}]},
        "communication": {"ranks": 2, "formats": {}, "bytes": 0},
        "weights": stored,
    }
    state = {"formats": {"fp32": {"bytes": 8}}, "bytes": 8}
    assert lines({"rows": rows, "engine": "te", "engine_state": state})[1:] == [
        "GEMM f 14 Linear, as a.[red]b input fp8_e4m3 × weight bf16 -",
        "GEMM d input fp8_e4m3 × weight bf16 -",
        "GEMM f 1 Conv1D, as a.[red]b input bf16 × weight bf16 -",
        "GEMM d input bf16 × weight bf16 -",
        "attention forward 2 calls fp8_e4m3 -",
        "communication 2 ranks none 0 B",
        "weights fp32 1.0 KiB, bf16 3 B 1.0 KiB",
        "histories, scales te fp32 8 B",
    ]


def test_rows_that_are_unknown_or_missing_harm_nothing() -> None:
    assert len(lines({"rows": {"gradients_of_the_future": {"bytes": 3}}})) == 1
    assert len(lines({})) == 1
