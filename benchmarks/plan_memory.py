"""How near ``plan`` comes to the memory that a GPU uses: three real steps of each shape and recipe.

    python benchmarks/plan_memory.py [--only 125M 1B] [--recipes te bf16] [--work FOLDER]

Each case is trained by ``python -m fp8core train`` in a process of its own (random weights,
built-in data, no evaluation, nothing saved), and the peak in its report is compared with the
estimate of ``plan`` for the same spec. Prints one line a case and the largest deviation; exits with
1 where that is beyond 10 %. ``--dry`` prints the estimates alone, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fp8core.models import plan
from fp8core.spec import parse_spec

BOUND = 0.10
LARGE_VOCABULARY = {"vocab_size": 128256, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "125M": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, **LARGE_VOCABULARY,
    },
    "3B": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        **LARGE_VOCABULARY,
    },
}  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "te": ({"engine": "te", "scaling": "delayed"}, "method"),
    "te, bf16 stored": ({"engine": "te", "scaling": "delayed"}, "throughput"),
    "bf16": ({"engine": "amp", "dtype": "bf16"}, "method"),
    "bf16, bf16 stored": ({"engine": "amp", "dtype": "bf16"}, "throughput"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["te", "bf16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--work", type=Path, help="where to train; default: a temporary folder")
    parser.add_argument("--dry", action="store_true", help="estimates only")
    arguments = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        for shape in arguments.only:
            for recipe in arguments.recipes:
                document = spec_of(shape, recipe, arguments.batch, arguments.length)
                estimate = plan(parse_spec(document)).memory
                told = f"{shape:>5} {recipe:<18} estimate {gib(estimate['total'])} GiB"
                if arguments.dry:
                    print(told, {key: round(value / 2**30, 2) for key, value in estimate.items()})
                    continue
                started = time.perf_counter()
                measured = peak_of(document, work / f"{shape}-{recipe.replace(', ', '-')}")
                seconds = time.perf_counter() - started
                ratio = estimate["total"] / measured
                worst = max(worst, abs(ratio - 1.0))
                print(f"{told}, measured {gib(measured)} GiB, ratio {ratio:.3f} ({seconds:.0f} s)")
    if arguments.dry:
        return 0
    print(f"largest deviation {worst:.1%} (bound {BOUND:.0%})")
    return int(worst > BOUND)


def spec_of(shape: str, recipe: str, batch: int, length: int) -> dict[str, Any]:
    """The job of one case."""
    chosen, precision = RECIPES[recipe]
    config = {"model_type": "llama", "max_position_embeddings": length, **SHAPES[shape]}
    return {
        "model": {"source": "config", "config": config},
        "tokenizer": "bytes",
        "data": {"source": "builtin"},
        "recipe": chosen,
        "training": {
            "steps": 3,
            "batch_size": batch,
            "sequence_length": length,
            "precision": precision,
        },
        "evaluation": {"fraction": 0, "every_steps": 0},
        "checkpoint": {"every_steps": 0, "keep_best": 0, "final": False},
        "telemetry": {"fp8_every_steps": 0},
    }


def peak_of(document: dict[str, Any], workdir: Path) -> int:
    """Bytes: trains the job and reads its report. Raises where it does not end well."""
    workdir.mkdir(parents=True, exist_ok=True)
    spec = workdir / "input.json"
    spec.write_text(json.dumps(document))
    command = [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    report = json.loads((workdir / "report.json").read_bytes())
    if report["device"]["type"] != "cuda":
        raise SystemExit("this needs a GPU; --dry prints the estimates alone")
    return int(report["memory"]["peak_bytes"])


def gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
