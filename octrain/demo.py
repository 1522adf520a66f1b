"""The whole service once, on this machine: ``python -m octrain.demo``.

Starts the local stack in a temporary folder, submits an FP8 job and its full-precision baseline
over HTTP, follows both, compares them, fetches what they made into ``runs/demo`` and stops
everything.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console
from rich.markup import escape

from octrain.cli.render import number, table
from octrain.cli.watch import JobBars
from octrain.client import Client, Job, OctrainError
from octrain.local.errors import LocalStackError
from octrain.local.leftovers import processes_of
from octrain.local.processes import become_subreaper
from octrain.local.stack import LocalStack

RESULTS = Path("runs") / "demo"
STEPS = 160
_FP8_FIELDS = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
BASELINE_RECIPE = {"engine": "amp", "dtype": "fp32"}


def spec(name: str, recipe: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """A Llama of about a million parameters on English text that every Python ships.

    Every dimension is a multiple of 16, as FP8 GEMMs need.
    """
    return {
        "name": name,
        "labels": {"from": "demo"},
        "model": {
            "source": "config",
            "config": {
                "model_type": "llama",
                "vocab_size": 1024,
                "hidden_size": 128,
                "intermediate_size": 352,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 128,
                "tie_word_embeddings": False,
            },
        },
        "tokenizer": {"source": "train", "vocab_size": 1024},
        "data": {"source": "builtin", "name": "python_topics"},
        "recipe": recipe,
        # A model this small is slower in FP8: a GPU that is known would train it in bf16 instead.
        "conversion": {"small_gemm": "off"},
        "training": {
            "steps": steps,
            "batch_size": 8,
            "sequence_length": 128,
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "schedule": {"name": "cosine", "warmup_steps": min(20, steps // 10)},
        },
        "evaluation": {"every_steps": 80, "fraction": 0.05},
        "checkpoint": {"every_steps": 80, "keep_last": 1},
    }


def main() -> int:
    console = Console()
    for number_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_, signal.getsignal(signal.SIGINT))
    become_subreaper()
    try:
        with tempfile.TemporaryDirectory(prefix="octrain-demo-") as folder:
            ended_well = run(console, Path(folder))
            if left := processes_of(Path(folder).absolute()):
                console.print(f"Processes are left over: {left}")
                return 1
            return 0 if ended_well else 1
    except (LocalStackError, OctrainError) as error:
        console.print(f"The demo failed: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130


def run(console: Console, data_dir: Path, steps: int = STEPS, results: Path = RESULTS) -> bool:
    """The demo on a data folder of its own; whether both jobs succeeded."""
    began = time.monotonic()
    stack = LocalStack(data_dir, on_event=lambda text: console.print(text, markup=False))
    with stack:
        say(console, f"The service answers at {stack.url} after {time.monotonic() - began:.1f} s.")
        if not stack.wait_for_nodes():
            raise LocalStackError(
                f"No node registered:\n{stack.process('worker-local').log_tail()}"
            )
        say(console, f"Watch it at {stack.url}/dashboard (sign in with {stack.api_key}).")
        with Client(stack.url, stack.api_key) as client:
            recipe = fp8_recipe(client)
            jobs = [
                client.jobs.create(spec(f"llama-{recipe['engine']}-fp8", recipe, steps)),
                client.jobs.create(spec("llama-fp32", BASELINE_RECIPE, steps)),
            ]
            for job in jobs:
                say(console, f"POST /v1/jobs -> {job.id} ({job.data.name})")
            follow(console, stack, jobs)
            for job in jobs:
                job.refresh()
            failed = [job for job in jobs if job.status != "succeeded"]
            for job in failed:
                say(console, f"{job.data.name} {job.status}: {job.data.reason}: {job.data.detail}")
                for line in list(job.logs())[-20:]:
                    say(console, f"  {line.text}")
            if not failed:
                compare(console, jobs)
                tell_conversion(console, jobs[0])
                fetch(console, jobs, results)
        stopping = time.monotonic()
    say(
        console,
        f"Everything stopped in {time.monotonic() - stopping:.1f} s; "
        f"{time.monotonic() - began:.0f} s in all.",
    )
    return not failed


def fp8_recipe(client: Client) -> dict[str, Any]:
    """Transformer Engine where a node has it, else the exact emulation on the CPU."""
    engine = "te" if any(n.live and n.engine_works("te") for n in client.nodes()) else "emulated"
    return {"engine": engine, **_FP8_FIELDS}


def follow(console: Console, stack: LocalStack, jobs: list[Job]) -> None:
    """Show both jobs' progress until they have ended, each over a connection of its own."""
    failures: list[Exception] = []

    def watch(bars: JobBars, job_id: str) -> None:
        try:
            with Client(stack.url, stack.api_key) as client:
                bars.watch(client.jobs.get(job_id))
        except Exception as error:
            failures.append(error)

    with JobBars(console) as bars:
        # Daemons, and joined with a timeout: Ctrl-C must neither wait for a job nor for a thread.
        threads = [Thread(target=watch, args=(bars, job.id), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.1)
            threads[-1].join(0.1)
    if failures:
        raise failures[0]


def compare(console: Console, jobs: list[Job]) -> None:
    """Both losses and their gap, and the speed of each."""
    rows = table("JOB", ">TRAIN LOSS", ">HELD-OUT LOSS", ">TOKENS/S")
    losses = []
    for job in jobs:
        latest = job.data.latest_metrics
        losses.append(latest["eval/loss"])
        rows.add_row(
            escape(job.data.name or job.id),
            number(latest.get("train/loss")),
            f"{latest['eval/loss']:.4f}",
            number(tokens_per_second(job)),
        )
    console.print(rows)
    gap = losses[0] - losses[1]
    say(
        console,
        f"Gap of the held-out losses, FP8 - FP32: {gap:+.4f} ({100 * gap / losses[1]:+.2f} %).",
    )


def tokens_per_second(job: Job) -> float | None:
    """The median over the run."""
    values = sorted(v for s in job.metrics("perf/tokens_per_second") for v in s.values)
    return round(values[len(values) // 2]) if values else None


def tell_conversion(console: Console, job: Job) -> None:
    """What now runs in FP8, and what does not and why."""
    rows = job.conversion()
    converted = Counter((row["from"], row["to"]) for row in rows if row["to"])
    kept = [row for row in rows if not row["to"]]
    say(console, f"Of {len(rows)} layers, {len(rows) - len(kept)} were converted:")
    for (source, target), count in sorted(converted.items()):
        say(console, f"  {count:3} x {source} -> {target}")
    reasons = Counter((row["from"], row["reason"]) for row in kept)
    for (source, reason), count in sorted(reasons.items()):
        names = [row["name"] for row in kept if (row["from"], row["reason"]) == (source, reason)]
        shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
        say(console, f"  {count:3} x {source} kept ({shown}): {reason}")


def fetch(console: Console, jobs: list[Job], results: Path) -> None:
    """Model and report of each job, from the service to this folder."""
    for job in jobs:
        folder = results / (job.data.name or job.id)
        for kind in ("model", "report"):
            job.download(kind, folder / kind)
            say(console, f"{kind} of {job.data.name}: {(folder / kind).absolute()}")


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
