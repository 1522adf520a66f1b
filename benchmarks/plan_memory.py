"""How near ``plan`` comes to the memory that a GPU uses: three real steps of each shape and recipe.

    python benchmarks/plan_memory.py [--only 125M 1B 3B] [--recipes te bf16] [--batch 2]
        [--length 2048] [--out FILE.json] [--room GIB] [--blocks 12] [--work FOLDER]

Each case is trained as ``python -m fp8core train`` does, in a process of its own (random weights,
built-in data, no evaluation, nothing saved), and the peak in its report is compared with the
estimate of ``plan`` for the same spec. Cases run beside one another while their estimates fit into
``--room``: what PyTorch's allocator reports is each process's own.

Prints one line a case, what the estimate consists of, and what was allocated at the moment of the
peak: PyTorch's record of allocations is replayed, and the blocks that lived then are added up by
size and by the line that asked for them (those of the backward pass have none). Exits with 1 where
the largest deviation is beyond 10 %. ``--dry`` prints the estimates alone, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.models import Plan, plan
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
TE = {"engine": "te", "scaling": "delayed"}
BF16 = {"engine": "amp", "dtype": "bf16"}
RECIPES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "te": (TE, "method", {}),
    "te, layer by layer": (TE, "method", {"fuse": "none"}),
    "te, head in FP8": (TE, "method", {"output_head": True}),
    "te, bf16 stored": (TE, "throughput", {}),
    "bf16": (BF16, "method", {}),
    "bf16, layer by layer": (BF16, "method", {"fuse": "none"}),
    "bf16, bf16 stored": (BF16, "throughput", {}),
}
# Of the host's start a case uses little of the GPU; more at once would wait for the host's cores.
AT_ONCE = 3
OVERHEAD = 2 << 30  # CUDA's context, and what the allocator holds beyond what is in use
OURS = ("fp8core", "transformer_engine", "transformers")


@dataclass
class Case:
    """One shape under one recipe: its estimate, and the process that trains it."""

    name: str
    document: dict[str, Any]
    estimate: Plan
    process: subprocess.Popen[str] | None = None
    started: float = 0.0

    @property
    def needs(self) -> int:
        return int(self.estimate.memory["total"] * (1 + BOUND)) + OVERHEAD


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["te", "bf16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--work", type=Path, help="where to train; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    parser.add_argument("--room", type=float, default=120.0, help="GiB for all cases at once")
    parser.add_argument("--blocks", type=int, default=12, help="lines to print of each peak")
    parser.add_argument("--dry", action="store_true", help="estimates only")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case is not None:
        return train_recorded(chosen.case)
    cases = []
    for shape in chosen.only:
        for recipe in chosen.recipes:
            document = spec_of(shape, recipe, chosen.batch, chosen.length)
            cases.append(Case(f"{shape} {recipe}", document, plan(parse_spec(document))))
    if chosen.dry:
        for case in cases:
            print(f"{case.name:<24} estimate {gib(case.estimate.memory['total'])} GiB")
            print_estimate(case.estimate)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        results = run(
            cases, (chosen.work or Path(temporary)).resolve(), int(chosen.room * 2**30), chosen
        )
    worst = max(abs(found.get("ratio", 2.0) - 1.0) for found in results)
    print(f"largest deviation {worst:.1%} (bound {BOUND:.0%})")
    return int(worst > BOUND)


def spec_of(shape: str, recipe: str, batch: int, length: int) -> dict[str, Any]:
    """The job of one case."""
    engine, precision, conversion = RECIPES[recipe]
    config = {"model_type": "llama", "max_position_embeddings": length, **SHAPES[shape]}
    return {
        "model": {"source": "config", "config": config},
        "tokenizer": "bytes",
        "data": {"source": "builtin"},
        "recipe": engine,
        "conversion": {"small_gemm": "off", **conversion},
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


def run(
    cases: list[Case], work: Path, room: int, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """Trains all cases, the largest first; prints and writes each as it ends."""
    waiting = sorted(cases, key=lambda case: case.needs, reverse=True)
    running: list[Case] = []
    results: list[dict[str, Any]] = []
    try:
        while waiting or running:
            for case in list(waiting):
                taken = sum(other.needs for other in running)
                if not running or (len(running) < AT_ONCE and taken + case.needs <= room):
                    start(case, work)
                    waiting.remove(case)
                    running.append(case)
            ended = [case for case in running if case.process and case.process.poll() is not None]
            for case in ended:
                running.remove(case)
                results.append(result_of(case, work / case.name, chosen.blocks))
                if chosen.out is not None:
                    chosen.out.write_text(json.dumps(results, indent=1))
            time.sleep(0.2)
    finally:
        for case in running:
            if case.process is not None:
                case.process.kill()
                case.process.wait()
    return results


def start(case: Case, work: Path) -> None:
    folder = work / case.name
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "input.json"
    spec.write_text(json.dumps(case.document))
    command = [sys.executable, __file__, "--case", str(spec)]
    case.started = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        case.process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[1],
        )


def result_of(case: Case, folder: Path, shown: int) -> dict[str, Any]:
    """Reads what the case left, prints it, and gives it as JSON."""
    assert case.process is not None
    estimate = case.estimate
    found: dict[str, Any] = {
        "case": case.name,
        "seconds": round(time.perf_counter() - case.started, 1),
        "estimate": estimate.memory,
        "moments": estimate.memory_moments,
        "fusion_planned": estimate.fusion,
    }
    told = f"{case.name:<24} estimate {gib(estimate.memory['total'])} GiB"
    report = folder / "report.json"
    if case.process.returncode or not report.exists():
        said = (folder / "output.txt").read_text()[-3000:]
        print(f"{told}, failed ({case.process.returncode}):\n{said}", flush=True)
        return {**found, "error": said}
    facts = json.loads(report.read_bytes())
    measured = int(facts["memory"]["peak_bytes"])
    found |= {
        "device": facts["device"],
        "measured": measured,
        "ratio": round(estimate.memory["total"] / measured, 4),
        **json.loads((folder / "peak.json").read_bytes()),
        "fusion": fused_of(folder / "conversion.json", {"Linear", "LlamaRMSNorm"}),
    }
    print(
        f"{told}, measured {gib(measured)} GiB, ratio {found['ratio']:.3f} "
        f"({found['seconds']:.0f} s; {found['fusion']})"
    )
    print_estimate(estimate)
    print(f"    at the peak, {gib(found['peak_of_record'])} GiB of recorded blocks:")
    for block in found["blocks_at_peak"][:shown]:
        print(f"      {gib(block['bytes'])} = {block['count']} x {block['size']:,} {block['by']}")
    sys.stdout.flush()
    return found


def print_estimate(estimate: Plan) -> None:
    for kind in (estimate.memory, estimate.memory_moments):
        print(f"    {', '.join(f'{key} {gib(value)}' for key, value in kind.items())}")


def fused_of(conversion: Path, layers: set[str]) -> str:
    """What became of all that is no single layer (a class of ``layers``), by the report."""
    counts: dict[str, int] = defaultdict(int)
    for row in json.loads(conversion.read_bytes()):
        if row["from"] not in layers:
            counts[f"{row['from']} to {row['to']}: {row['reason'] or 'wholly'}"] += 1
    return "; ".join(f"{count} {told}" for told, count in counts.items()) or "nothing is fused"


# In the process of one case


def train_recorded(spec: Path) -> int:
    """Trains ``spec`` beside its file, and writes ``peak.json`` there."""
    import torch

    from fp8core.commands.cli import main as command

    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; --dry prints the estimates alone")
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=1_000_000
    )
    code = command(["train", str(spec), "--workdir", str(spec.parent)])
    snapshot = torch.cuda.memory._snapshot()
    events = [event for trace in snapshot["device_traces"] for event in trace]
    peak, blocks = blocks_at_peak(events)
    statistics = torch.cuda.memory_stats()
    written = {
        "peak_of_record": peak,
        "allocator": {
            key: statistics[f"{key}_bytes.all.peak"]
            for key in ("allocated", "requested", "active", "reserved")
        },
        "events": len(events),
        "blocks_at_peak": blocks,
    }
    (spec.parent / "peak.json").write_text(json.dumps(written))
    return code


def blocks_at_peak(events: Iterable[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """The most bytes at once, and what lived then, by size and by who asked for it.

    ``events`` are those of PyTorch's allocator in their order. A block counts until it is freed by
    its owner, not until the allocator has it back.
    """
    events = list(events)
    total = peak = moment = 0
    sizes: dict[int, int] = {}
    for place, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
            if total > peak:
                peak, moment = total, place
        elif event["action"] == "free_requested":
            total -= sizes.pop(event["addr"], 0)
    living: dict[int, dict[str, Any]] = {}
    for event in events[: moment + 1]:
        if event["action"] == "alloc":
            living[event["addr"]] = event
        elif event["action"] == "free_requested":
            living.pop(event["addr"], None)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for event in living.values():
        counts[event["size"], origin_of(event.get("frames", ()))] += 1
    largest = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])[:40]
    return peak, [
        {"bytes": size * count, "size": size, "count": count, "by": by}
        for (size, by), count in largest
    ]


def origin_of(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost lines in our own or the libraries' code, at most three: ``linear.py:702``."""
    lines = []
    for frame in frames:
        parts = Path(frame["filename"]).parts
        if any(part in OURS for part in parts):
            lines.append(f"{parts[-1]}:{frame['line']} {frame['name']}")
        if len(lines) == 3:
            break
    return " < ".join(lines) or "(no Python line: the backward pass, or PyTorch's own)"


def gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
