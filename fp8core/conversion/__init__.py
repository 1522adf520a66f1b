"""Conversion of a model's layers to a precision engine's, its report, and the way back."""

from fp8core.conversion.convert import convert
from fp8core.conversion.decide import Decision, Refusals, decide
from fp8core.conversion.key_map import Join, KeyMap, Piece
from fp8core.conversion.report import ConversionReport, ConversionRow, count_rows
from fp8core.conversion.restore import restore, restore_layers
from fp8core.conversion.small_gemm import SmallGemmRule, SmallGemms, small_gemm_rule

__all__ = [
    "ConversionReport",
    "ConversionRow",
    "Decision",
    "Join",
    "KeyMap",
    "Piece",
    "Refusals",
    "SmallGemmRule",
    "SmallGemms",
    "convert",
    "count_rows",
    "decide",
    "restore",
    "restore_layers",
    "small_gemm_rule",
]
