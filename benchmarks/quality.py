"""Quality beside speed: losses of one model on real text in every precision, and time to a loss.

    python benchmarks/quality.py OUT [--shape 100m] [--steps 500] [--rows bf16,delayed,...]
        [--dry-run]
    python benchmarks/quality.py OUT --table

Trains the shape with the product itself (``python -m fp8core train``), a row after another, on the
same batches of Python's standard library (bytes as tokens). Rows called ``NAME_again`` are
the same once more and ``NAME_seed`` begin from other weights: what two runs differ by without any
difference in precision. ``*_plain``: layer by layer, where blocks are fused by default.

Each row leaves ``OUT/SHAPE-STEPS-ROW.json``, and one that is there is not run again: rows can be
spread over many short calls. ``--table`` prints what is there as Markdown: mean losses of the last
steps, the gap to ``bf16``, tokens a second, and the seconds of training until the smoothed loss
was first as low as ``bf16``'s at the end. ``--dry-run``: tiny, on a CPU, te's rows by `emulated`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

SEEDS = {"seed": 1}
LAST = 20
"""Steps over which losses are averaged."""

SHAPES: dict[str, dict[str, int]] = {
    "dry": {"hidden": 32, "mlp": 64, "layers": 2, "heads": 2, "kv_heads": 2},
    "100m": {"hidden": 768, "mlp": 2560, "layers": 12, "heads": 12, "kv_heads": 12},
    "1b": {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "kv_heads": 8},
}
DELAYED = {"engine": "te", "amax_history_len": 16}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"engine": "amp", "dtype": "bf16"},
    "delayed": DELAYED,
    "current": {"engine": "te", "scaling": "current"},
    "block": {"engine": "te", "scaling": "block"},
    "torchao": {"engine": "torchao"},
}
ROWS = (
    *("bf16", "bf16_again", "bf16_seed", "delayed", "delayed_again", "delayed_seed"),
    *("delayed_plain", "current", "current_plain", "block", "block_plain", "torchao"),
)


def spec_of(row: str, chosen: argparse.Namespace, text: Path) -> dict[str, Any]:
    name, _, variant = row.partition("_")
    recipe = RECIPES[name]
    if chosen.dry_run and recipe["engine"] == "te":
        scaling = {"scaling": "current"} if name == "current" else {}
        recipe = {"engine": "emulated", **scaling}
    shape = SHAPES[chosen.shape]
    return {
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "hidden_size": shape["hidden"],
                "intermediate_size": shape["mlp"],
                "num_hidden_layers": shape["layers"],
                "num_attention_heads": shape["heads"],
                "num_key_value_heads": shape["kv_heads"],
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
            },
        },
        "tokenizer": {"source": "bytes"},
        "data": {"source": "jsonl", "path": str(text)},
        "recipe": recipe,
        # Layers that FP8 does not make faster are to show what it does to the loss all the same.
        "conversion": {
            "small_gemm": "off",
            "fuse": "none" if variant == "plain" else "auto",
        },
        "training": {
            "steps": chosen.steps,
            "batch_size": 2 if chosen.dry_run else 8,
            "sequence_length": 64 if chosen.dry_run else 1024,
            "seed": SEEDS.get(variant, 0),
            "optimizer": {"lr": chosen.learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "schedule": {"name": "cosine", "warmup_steps": max(1, chosen.steps // 20)},
        },
        "evaluation": {"every_steps": 0, "fraction": 0.0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"fp8_every_steps": 0},
        "resources": {"device": "cpu" if chosen.dry_run else "cuda"},
    }


def write_text(path: Path, characters: int) -> None:
    """The sources of Python's standard library, one a line."""
    written = 0
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if written >= characters:
                break
            if "site-packages" in source.parts:
                continue
            text = source.read_text(encoding="utf-8", errors="ignore")
            written += len(text)
            file.write(json.dumps({"text": text}) + "\n")


def run(row: str, chosen: argparse.Namespace, text: Path, folder: Path) -> dict[str, Any]:
    """Trains the row; its losses and seconds by step, and what its report says."""
    spec = folder / f"{row}.json"
    spec.write_text(json.dumps(spec_of(row, chosen, text)))
    workdir = folder / row
    command = [sys.executable, "-m", "fp8core", "train", str(spec), "--workdir", str(workdir)]
    subprocess.run(command, check=True)
    losses, seconds, tokens = [], [], []
    for line in (workdir / "telemetry.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "metrics" and "train/loss" in record["values"]:
            values = record["values"]
            losses.append(round(float(values["train/loss"]), 5))
            seconds.append(round(float(values["perf/step_seconds"]), 5))
            tokens.append(float(values["perf/tokens_per_second"]))
    report = json.loads((workdir / "report.json").read_bytes())
    return {
        "row": row,
        "shape": chosen.shape,
        "steps": len(losses),
        "parameters": report["model"]["parameters"],
        "converted": report["conversion"]["converted"],
        "device": report["device"]["name"],
        "torch": report["versions"]["torch"],
        # The first steps build kernels.
        "tokens_per_second": sorted(tokens[len(tokens) // 5 :])[
            len(tokens[len(tokens) // 5 :]) // 2
        ],
        "losses": losses,
        "seconds": seconds,
    }


def smoothed(losses: list[float]) -> list[float]:
    """Means of up to the last ``LAST`` losses."""
    return [fmean(losses[max(0, end - LAST) : end]) for end in range(1, len(losses) + 1)]


def seconds_to(loss: float, found: dict[str, Any]) -> float | None:
    """Seconds of training until the smoothed loss is first ``loss`` or less."""
    for value, spent in zip(smoothed(found["losses"]), accumulate(found["seconds"]), strict=True):
        if value <= loss:
            return spent
    return None


def table(folder: Path, shape: str, steps: int) -> str:
    known = [folder / f"{shape}-{steps}-{row}.json" for row in ROWS]
    rows = [json.loads(path.read_text()) for path in known if path.exists()]
    if not rows:
        return f"no rows of {shape} and {steps} steps in {folder}"
    base = next((found for found in rows if found["row"] == "bf16"), rows[0])
    target = smoothed(base["losses"])[-1]
    lines = [
        f"{shape}: {base['parameters']:,} parameters, {steps} steps, {base['device']}, torch "
        f"{base['torch']}; losses are means of the last {LAST} steps",
        "",
        f"| row | loss | to {base['row']} | tokens/s | seconds to {base['row']}'s loss |",
        "|---|---|---|---|---|",
    ]
    for found in rows:
        loss = smoothed(found["losses"])[-1]
        needed = seconds_to(target, found)
        lines.append(
            f"| {found['row']} | {loss:.4f} | {loss - target:+.4f} | "
            f"{found['tokens_per_second']:,.0f} | "
            f"{'not reached' if needed is None else f'{needed:.1f}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--table", action="store_true", help="print what is there")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if chosen.dry_run:
        chosen.shape = "dry"
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    if not chosen.table:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_text(folder / "text.jsonl", 200_000 if chosen.dry_run else 16_000_000)
            for row in chosen.rows.split(","):
                if row not in ROWS:
                    parser.error(f"{row} is no row; there are {', '.join(ROWS)}")
                path = out / f"{chosen.shape}-{chosen.steps}-{row}.json"
                if not path.exists():
                    found = run(row, chosen, folder / "text.jsonl", folder)
                    path.write_text(json.dumps(found) + "\n")
    print(table(out, chosen.shape, chosen.steps))


if __name__ == "__main__":
    main()
