"""What a step waits for its batch: made by the training thread itself, and made ahead by another.

A small Llama trains on Python's standard library in documents of 3,000 characters, with a tokenizer
of 32,000 tokens trained on them, packed to 2 x 4096 tokens a step: first what a batch costs to make
with nothing beside it, then the loop of every run, by turns with batches made in the step and made
ahead. Times are those between one step's figures and the next's, so that the batch is in them. Most
batches are cut from documents that are encoded already; the mean tells what all cost together, the
longest what a step waits that comes upon documents to encode.

    python benchmarks/prefetch.py [--device cpu] [--engine amp] [--format text] [--layers 12] ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fp8core import engines
from fp8core.commands.quiet import quieten_libraries
from fp8core.data import TrainingData, load_tokenizer, open_corpus, open_dataset
from fp8core.data.prefetch import PrefetchedBatches
from fp8core.models import load
from fp8core.spec import JobSpec, parse_spec
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.assemble import assemble
from fp8core.training.loop import TrainingLoop
from fp8core.training.position import Position
from fp8core.training.precision import dtype_of
from fp8core.training.run_parts import RunParts
from fp8core.training.stopping import StopRequest
from fp8core.training.workdir import Workdir

_CHARACTERS = 3000
# Kernels compile, and a CUDA graph is captured where the host is the limit.
_WARM_UP = 24


def main() -> None:
    arguments = _arguments()
    quieten_libraries()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        spec = _spec(arguments, _write_documents(place, arguments.format))
        corpus = open_corpus(spec)
        tokenizer = load_tokenizer(spec, texts=corpus.sample_texts())

        def fresh() -> TrainingData:
            return open_dataset(spec, tokenizer, corpus=corpus)

        _tell("a batch alone", _times_alone(fresh(), arguments.steps))
        device = torch.device(arguments.device)
        engine = engines.create(spec.recipe, device)
        random_state.seed_everything(0, device)
        dtype = dtype_of(spec.training.precision.weights)
        assembled = assemble(
            spec, engine, load(spec, device=device, dtype=dtype, tokenizer=tokenizer)
        )
        with Workdir(place / "work") as workdir, TelemetryWriter(workdir.telemetry) as telemetry:
            parts = RunParts(
                spec=spec,
                learner=assembled.learner,
                conversion=assembled.conversion,
                adapter=None,
                data=fresh(),
                telemetry=telemetry,
                checkpoints=None,
                workdir=workdir,
            )
            for _ in range(arguments.turns):
                _tell("a step, batch made in it", _times_of_steps(parts))
                data = fresh()
                with PrefetchedBatches(data.train, device) as ahead:
                    made_ahead = replace(parts, data=replace(data, train=ahead))
                    _tell("a step, batches made ahead", _times_of_steps(made_ahead))
                parts = replace(parts, data=fresh())


def _times_alone(data: TrainingData, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        next(data.train)
        times.append(time.perf_counter() - began)
    return times[_WARM_UP:]


def _times_of_steps(parts: RunParts) -> list[float]:
    ends: list[float] = []

    def on_figures(position: Position, values: Mapping[str, float]) -> None:
        ends.append(time.perf_counter())

    TrainingLoop(parts, Position(), StopRequest(), on_figures).run()
    return [after - before for before, after in pairwise(ends)][_WARM_UP:]


def _tell(name: str, seconds: list[float]) -> None:
    print(
        f"{name:<28}{1000 * statistics.fmean(seconds):8.2f} ms mean of {len(seconds)}, "
        f"{1000 * statistics.median(seconds):.2f} median, {1000 * max(seconds):.2f} longest",
        flush=True,
    )


def _write_documents(folder: Path, format: str) -> Path:
    path = folder / "documents.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = source.read_text(encoding="utf-8", errors="ignore")
            for start in range(0, len(text), _CHARACTERS):
                file.write(json.dumps(_document(text[start : start + _CHARACTERS], format)) + "\n")
    return path


def _document(text: str, format: str) -> dict[str, Any]:
    if format == "text":
        return {"text": text}
    question, answer = text[: len(text) // 5], text[len(text) // 5 :]
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def _spec(arguments: argparse.Namespace, path: Path) -> JobSpec:
    heads = max(arguments.hidden // 64, 1)
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 8 // 3,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": arguments.length,
    }
    return parse_spec(
        {
            "model": {"source": "config", "config": config},
            "tokenizer": {"source": "train", "vocab_size": 32_000},
            "data": {"source": "jsonl", "path": str(path), "format": arguments.format},
            "recipe": {"engine": arguments.engine},
            "training": {
                "steps": arguments.steps,
                "batch_size": 2,
                "sequence_length": arguments.length,
            },
            "evaluation": {"fraction": 0.0},
            "checkpoint": {"every_steps": 0, "keep_best": 0, "final": False},
            "telemetry": {"log_every_steps": 1, "fp8_every_steps": 0},
            "resources": {"device": arguments.device},
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", choices=["amp", "te", "emulated"], default="amp")
    parser.add_argument("--format", choices=["text", "chat"], default="text")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=72, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.steps < _WARM_UP + 2:
        parser.error(f"--steps must be at least {_WARM_UP + 2}: {_WARM_UP} are not counted")
    return arguments


if __name__ == "__main__":
    main()
