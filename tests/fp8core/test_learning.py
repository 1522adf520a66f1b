"""Emulated FP8 learns as well as fp32: the short form of ``benchmarks/learning.py``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.learning import BEATS_TRIGRAM_BY, LARGEST_GAP, measure, trigram_bits_per_byte


def test_fp8_and_fp32_beat_a_trigram_and_differ_little(tmp_path: Path) -> None:
    outcome = measure(tmp_path, short=True)
    assert outcome.gain >= BEATS_TRIGRAM_BY, outcome
    assert outcome.gap < LARGEST_GAP, outcome
    assert outcome.models["emulated HYBRID"] != outcome.models["amp fp32"]


def test_the_trigram_predicts_what_a_trigram_can() -> None:
    # "abacabad...": after two letters of a cycle of three the next one is certain.
    cycle = "abc" * 200
    bits = trigram_bits_per_byte([cycle], [cycle], lambda text: list(text.encode()), 256)
    assert bits < 0.05
    # Letters in a fixed de Bruijn-like order without repetition carry their full entropy.
    coin = "".join("ab"[bin(n * 2654435761 % 2**32).count("1") % 2] for n in range(4000))
    bits = trigram_bits_per_byte([coin], [coin[::-1]], lambda text: list(text.encode()), 256)
    assert bits == pytest.approx(1.0, abs=0.1)
    assert not math.isnan(bits)
