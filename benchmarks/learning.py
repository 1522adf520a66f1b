"""A small Llama learns English in emulated FP8 as well as in fp32.

Trains the same model twice on the built-in text with a BPE learned from it, once with the engine
``emulated`` (HYBRID, delayed scaling) and once with ``amp`` in fp32, same seed and batches. Prints
the held-out bits per byte of both beside two trigram baselines, and exits with 1 unless both models
beat the byte trigram by 10 % and differ from one another by less than 2 %.

    python benchmarks/learning.py            # 4.3 million parameters, 15 minutes on 2 cores
    python benchmarks/learning.py --short    # the form that the tests run

The baselines are interpolated n-grams (Jelinek and Mercer, 1980) whose weights are fitted to the
held-out text itself, in their favour. The token trigram reads the model's own tokens. It is strong
here: the help topics of Python quote one another, and it remembers every quotation exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.data import load_tokenizer, open_corpus
from fp8core.spec import parse_spec

RECIPES: dict[str, dict[str, Any]] = {
    "emulated HYBRID": {"engine": "emulated", "fp8_format": "HYBRID", "amax_history_len": 16},
    "amp fp32": {"engine": "amp", "dtype": "fp32"},
}
BEATS_TRIGRAM_BY = 0.10
LARGEST_GAP = 0.02


@dataclass(frozen=True)
class Outcome:
    """Held-out bits per byte of the models by recipe, and of the baselines."""

    models: dict[str, float]
    byte_trigram: float
    token_trigram: float
    seconds: dict[str, float]
    parameters: int

    @property
    def gap(self) -> float:
        """How far the two models lie apart, relative to fp32."""
        return abs(self.models["emulated HYBRID"] / self.models["amp fp32"] - 1.0)

    @property
    def gain(self) -> float:
        """By how much the worse of the two models beats the byte trigram."""
        return 1.0 - max(self.models.values()) / self.byte_trigram


def spec_of(recipe: dict[str, Any], *, short: bool) -> dict[str, Any]:
    """The job; the short form is smaller and stops early."""
    layers, steps, batch_size = (2, 70, 6) if short else (4, 600, 16)
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "hidden_size": 160 if short else 256,
                "intermediate_size": 320 if short else 704,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
        },
        "tokenizer": {"source": "train", "vocab_size": 4096},
        "data": {"source": "builtin"},
        "recipe": recipe,
        "training": {
            "steps": steps,
            "batch_size": batch_size,
            "sequence_length": 128,
            "optimizer": {"lr": 5e-3 if short else 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "schedule": {"name": "cosine", "warmup_steps": steps // 10},
        },
        "evaluation": {"every_steps": 0 if short else 100, "fraction": 0.1},
        "checkpoint": {"every_steps": 0},
        "telemetry": {"fp8_every_steps": 0},
        "resources": {"device": "cpu"},
    }


def measure(folder: Path, *, short: bool) -> Outcome:
    """Trains both models below ``folder`` and computes the baselines."""
    models, seconds, parameters = {}, {}, 0
    for name, recipe in RECIPES.items():
        workdir = folder / name.replace(" ", "-")
        path = folder / f"{workdir.name}.json"
        path.write_text(json.dumps(spec_of(recipe, short=short)))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "fp8core", "train", str(path), "--workdir", str(workdir)]
        subprocess.run(command, check=True, env=environment)
        report = json.loads((workdir / "report.json").read_bytes())
        models[name] = report["evaluation"]["figures"]["eval/bits_per_byte"]
        seconds[name] = report["durations"]["training_seconds"]
        parameters = report["model"]["parameters"]
    byte_trigram, token_trigram = baselines(short=short)
    return Outcome(models, byte_trigram, token_trigram, seconds, parameters)


def baselines(*, short: bool) -> tuple[float, float]:
    """Bits per byte of the byte trigram and of the token trigram, on the same split."""
    spec = parse_spec(json.dumps(spec_of(RECIPES["amp fp32"], short=short)))
    corpus = open_corpus(spec)
    training, held_out = list(corpus.training_texts()), list(corpus.evaluation_texts())
    tokenizer = load_tokenizer(spec, texts=training)

    def as_bytes(text: str) -> list[int]:
        return list(text.encode())

    return (
        trigram_bits_per_byte(training, held_out, as_bytes, 256),
        trigram_bits_per_byte(training, held_out, tokenizer.encode, tokenizer.vocab_size),
    )


def trigram_bits_per_byte(
    training: Sequence[str],
    held_out: Sequence[str],
    encode: Callable[[str], list[int]],
    vocabulary: int,
) -> float:
    """An interpolated trigram: uniform, unigram, bigram and trigram frequencies, weighted.

    The four weights are fitted to ``held_out`` by expectation maximisation.
    """
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    contexts: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    for text in training:
        symbols = [-1, -1, *encode(text)]
        for end in range(2, len(symbols)):
            for order in range(3):
                gram = tuple(symbols[end - order : end + 1])
                counts[order][gram] += 1
                contexts[order][gram[:-1]] += 1
    chances = []
    for text in held_out:
        symbols = [-1, -1, *encode(text)]
        for end in range(2, len(symbols)):
            chance = [1.0 / vocabulary]
            for order in range(3):
                gram = tuple(symbols[end - order : end + 1])
                seen = contexts[order][gram[:-1]]
                chance.append(counts[order][gram] / seen if seen else 0.0)
            chances.append(chance)
    weights = [0.25] * 4
    for _ in range(40):
        shares = [0.0] * 4
        for chance in chances:
            total = sum(w * c for w, c in zip(weights, chance, strict=True))
            for index in range(4):
                shares[index] += weights[index] * chance[index] / total
        weights = [share / len(chances) for share in shares]
    bits = -sum(
        math.log2(sum(w * c for w, c in zip(weights, chance, strict=True))) for chance in chances
    )
    return bits / sum(len(text.encode()) for text in held_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="the form that the tests run")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = measure(folder, short=arguments.short)
    print(f"\n{outcome.parameters:,} parameters; held-out bits per byte")
    print(f"  byte trigram      {outcome.byte_trigram:.4f}")
    print(f"  token trigram     {outcome.token_trigram:.4f}")
    for name, bits in outcome.models.items():
        gain = 1.0 - bits / outcome.byte_trigram
        print(
            f"  {name:<17} {bits:.4f}  {gain:.1%} below the byte trigram, "
            f"{outcome.seconds[name]:.0f} s of steps"
        )
    print(f"  the two differ by {outcome.gap:.2%}")
    holds = outcome.gain >= BEATS_TRIGRAM_BY and outcome.gap < LARGEST_GAP
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
