r"""What a CUDA graph of forward and backward saves where the host's launches are the limit.

    python benchmarks/graphed_step.py [--cases 125m:amp,125m:te] [--steps 20] [--jobs 125m:te] \
        [--fail] [--out FILE] [--dry-run]

For each case (shape and row) it builds the product's own `Learner` and takes the same steps from
the same weights three times: eagerly, eagerly again, and with forward and backward captured once in
a CUDA graph and replayed on each step's tokens. The norm, the clipping and the update stay eager:
they are a few launches, which the host enqueues while the graph runs. Prints milliseconds a step,
what the host took of them, what the graph alone takes on the GPU, memory, and how far losses and
weights of the second and third time are from those of the first. Rows named ``_packed`` have
another number of documents in each step. ``--jobs``: whole runs of the trainer too, one with
``training.cuda_graphs`` off and one with it as it is by default. Behind them all, what the floor of
a case's steps (`peers.floor`; attention within documents, the head in FP8 for all rows of te) is of
what they took. ``--dry-run`` takes the same steps on a CPU, tiny, te's by `emulated`; what a graph
does there is done eagerly, and times mean nothing.
Exits with 1 where a case failed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_clock import DeviceClock
from peers.floor import floor, told
from peers.octrain_rows import assembled, batch_of, spec_of
from peers.shapes import SHAPES
from peers.step_work import StepWork, llama_step
from peers.work import Work, real_text
from torch import Tensor

from fp8core.commands.train import run_train
from fp8core.data.batch import Batch
from fp8core.telemetry import read_records
from fp8core.training.gradient_graph import GradientGraph, capturing
from fp8core.training.late_metrics import LateMetrics
from fp8core.training.learner import Learner, StepTotals

PACKED = ("", "_packed")
CHANGES: dict[str, dict[str, Any]] = {
    "amp": {"fuse": "auto", "recipe": {"engine": "amp", "dtype": "bf16"}},
    "te": {"fuse": "auto", "output_head": True},
    "te_current": {"fuse": "auto", "recipe": {"engine": "te", "scaling": "current"}},
    "te_fp8_attention": {"fuse": "auto", "output_head": True, "fp8_attention": True},
}
CASES = [f"{shape}:{row}{packed}" for shape in SHAPES for row in CHANGES for packed in PACKED]
WARM_UP = 4
FEWEST, MOST = 8, 60  # documents a row
JOB_STEPS, LOGGED = 80, 5
DRY = {
    "cases": "tiny:amp,tiny:te_packed",
    "jobs": "tiny:te",
    "steps": 4,
    "length": 64,
}
Gradients = Callable[[int, Batch, StepTotals], Tensor]
"""(step, batch on the host, its totals) to the loss; gradients in ``.grad``."""


@dataclass(frozen=True)
class Course:
    """The steps of one course."""

    losses: list[float]
    weights: list[Tensor]
    milliseconds: float
    host_milliseconds: float
    peak: int


def eager(learner: Learner) -> Gradients:
    def gradients(step: int, batch: Batch, totals: StepTotals) -> Tensor:
        return learner.gradients(step, [batch], totals=totals)

    return gradients


def graphed(learner: Learner, example: Batch) -> Gradients:
    if learner.engine.device.type != "cuda":
        return eager(learner)
    graph = GradientGraph(learner, example, capturing())

    def gradients(step: int, batch: Batch, totals: StepTotals) -> Tensor:
        return graph.gradients(batch, totals.targets)

    return gradients


class Start:
    """Weights, optimizer and FP8 states of ``learner`` as they are now."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._weights = [p.detach().clone() for p in learner.model.parameters()]
        self._optimizer = {k: v.clone() for k, v in learner.optimizer.state_tensors().items()}
        self._engine = dict(learner.engine.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in zip(self._learner.model.parameters(), self._weights, strict=True):
            parameter.copy_(value)
        self._learner.optimizer.load_state_tensors(self._optimizer)
        self._learner.engine.load_state_dict(self._engine)


def train(learner: Learner, gradients: Gradients, batches: list[Batch], first: int) -> Course:
    """The steps of the product's loop; the first two are not timed."""
    device = learner.engine.device
    on_gpu = device.type == "cuda"
    late = LateMetrics(late=on_gpu)
    losses, host, clock = [], [], DeviceClock(device)
    synchronize(device)
    if on_gpu:
        # What is reserved counts: a graph holds its memory when nothing of it is allocated.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for number, batch in enumerate(batches, start=first):
        began = time.perf_counter()
        totals = learner.totals(number, [batch])
        loss = gradients(number, batch, totals)
        losses.append(loss.detach().clone())
        norm = learner.gradient_norm()
        before = time.perf_counter()
        late.push(number, {"train/loss": loss, "train/grad_norm": norm}, {})
        waited = time.perf_counter() - before
        bad = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        learner.update(number, norm, unless=bad)
        host.append(time.perf_counter() - began - waited)
        clock.mark()
    late.flush()
    return Course(
        [float(loss) for loss in losses],
        [parameter.detach().clone() for parameter in learner.model.parameters()],
        statistics.median(clock.milliseconds()[1:]),
        statistics.median(host[2:]) * 1000,
        torch.cuda.max_memory_reserved() if on_gpu else 0,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def apart(first: Course, second: Course) -> dict[str, float | bool]:
    """The largest difference of their losses, and that of their weights, relative in 2-norm."""
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    squares = [
        (float((a.float() - b.float()).square().sum()), float(a.float().square().sum()))
        for a, b in zip(first.weights, second.weights, strict=True)
    ]
    return {
        "first_losses": max(differences[:3]),
        "losses": max(differences),
        "weights": (sum(part for part, _ in squares) / sum(whole for _, whole in squares)) ** 0.5,
        "same": not any(differences) and not any(part for part, _ in squares),
    }


def batches_of(work: Work, packed: bool) -> list[Batch]:
    drawn = random.Random(0)
    found = []
    for ids in work.tokens:
        count = drawn.randint(FEWEST, MOST) if packed else 1
        found.append(batch_of(ids, sorted(drawn.sample(range(1, work.length), count - 1))))
    return found


def most_documents(batches: list[Batch]) -> Batch:
    """The batch that a graph of all of them is captured for."""

    def documents(batch: Batch) -> int:
        return 0 if batch.document_bounds is None else batch.document_bounds.numel()

    return max(batches, key=documents)


def alone(step: Callable[[], Any], device: torch.device, count: int = 10) -> float:
    """Milliseconds of each of ``count`` calls, with nothing between them."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - began) * 1000 / count


def work_of(chosen: argparse.Namespace, shape: str, tokens: Tensor) -> Work:
    _, rows, length = tokens.shape
    return Work(shape, rows, length, tokens, "bf16", torch.device(chosen.device))


def row(shape: str, name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    changes, packed = dict(CHANGES[name.removesuffix("_packed")]), name.endswith("_packed")
    tokens = real_text(WARM_UP + chosen.steps, chosen.batch, chosen.length)
    work = work_of(chosen, shape, tokens)
    began = time.perf_counter()
    learner: Learner = assembled(work, **changes)
    batches = batches_of(work, packed)
    device = learner.engine.device
    plain = eager(learner)
    train(learner, plain, batches[:WARM_UP], 1)
    start, first, measured = Start(learner), WARM_UP + 1, batches[WARM_UP:]
    built = time.perf_counter() - began
    courses = [train(learner, plain, measured, first)]
    start.restore()
    courses.append(train(learner, plain, measured, first))
    start.restore()
    began = time.perf_counter()
    graph = graphed(learner, most_documents(measured))
    synchronize(device)
    capture_seconds = time.perf_counter() - began
    courses.append(train(learner, graph, measured, first))
    totals = learner.totals(1, measured[:1])
    return {
        "shape": shape,
        "row": name,
        "eager_milliseconds": min(courses[0].milliseconds, courses[1].milliseconds),
        "graphed_milliseconds": courses[2].milliseconds,
        "graph_alone_milliseconds": alone(lambda: graph(1, measured[0], totals), device),
        "eager_host_milliseconds": courses[1].host_milliseconds,
        "graphed_host_milliseconds": courses[2].host_milliseconds,
        "peak_gib": [round(course.peak / 2**30, 2) for course in courses],
        "eager_again": apart(courses[0], courses[1]),
        "graphed": apart(courses[0], courses[2]),
        "losses": [[course.losses[0], course.losses[-1]] for course in courses],
        "build_seconds": round(built, 1),
        "capture_seconds": round(capture_seconds, 2),
    }


def documents_of(batches: list[Batch]) -> list[int]:
    """The tokens of each document of all ``batches``."""
    bounds = [batch.document_bounds for batch in batches]
    return [size for each in bounds if each is not None for size in each.diff().tolist()]


@functools.cache
def floor_of(step: StepWork, device: torch.device) -> dict[str, float]:
    """Cases of one shape have one."""
    return floor(step, device)


def shares(found: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """What the floor is of the steps of a case; prints it."""
    tokens = real_text(WARM_UP + chosen.steps, chosen.batch, chosen.length)
    work = work_of(chosen, found["shape"], tokens)
    packed = found["row"].endswith("_packed")
    documents = documents_of(batches_of(work, packed)[WARM_UP:]) if packed else ()
    size = (work.rows, work.length, work.dtype.itemsize)
    parts = floor_of(llama_step(work.dimensions, *size, documents), work.device)
    least = parts["bf16" if found["row"].startswith("amp") else "fp8"]
    of_steps = {kind: least / found[f"{kind}_milliseconds"] for kind in ("eager", "graphed")}
    said = ", ".join(f"{kind} at {share:.0%} of the floor" for kind, share in of_steps.items())
    print(f"{found['shape']}:{found['row']}: {said}; {told(parts)}", flush=True)
    return {"floor": parts, "of_floor": of_steps}


def job(shape: str, name: str, chosen: argparse.Namespace, graphs: str) -> dict[str, Any]:
    """A whole run of the trainer; its milliseconds are those of the steps behind half of it."""
    # A job reads tokens of its own.
    tokens = torch.zeros(JOB_STEPS, chosen.batch, chosen.length, dtype=torch.int64)
    changes = {**CHANGES[name], "training": {"cuda_graphs": graphs}}
    spec = spec_of(work_of(chosen, shape, tokens), **changes)
    spec |= {
        "evaluation": {"every_steps": 0, "fraction": 0},
        "checkpoint": {"every_steps": 0, "final": False},
        "telemetry": {"log_every_steps": LOGGED},
    }
    with tempfile.TemporaryDirectory() as folder:
        path, workdir = Path(folder, "spec.json"), Path(folder, "run")
        path.write_text(json.dumps(spec))
        if run_train(path, workdir, [], debug=True):
            raise RuntimeError(Path(workdir, "result.json").read_text())
        report = json.loads((workdir / "report.json").read_bytes())
        logged = [
            (record["step"], record["values"])
            for record, _ in read_records(workdir / "telemetry.jsonl")
            if record["type"] == "metrics" and "perf/step_seconds" in record["values"]
        ]
    late = [values["perf/step_seconds"] * 1000 for step, values in logged if step > JOB_STEPS // 2]
    return {
        "job": f"{shape}:{name}",
        "asked": graphs,
        "milliseconds": statistics.median(late),
        "least_and_most": [min(late), max(late)],
        "losses": [report["losses"]["train_first"], report["losses"]["train_last"]],
        "cuda_graphs": report["cuda_graphs"],
        "peak_gib": round(report["memory"]["peak_bytes"] / 2**30, 2),
    }


def failed_capture(learner: Learner, batch: Batch) -> str:
    """Whether eager steps go on as before behind a capture that fails in its middle."""
    plain, start = eager(learner), Start(learner)
    expected = train(learner, plain, [batch] * 3, 1)
    start.restore()
    learner.drop_gradients()
    compute = learner.forward_backward

    def waiting(*arguments: Any, **options: Any) -> Tensor:
        loss = compute(*arguments, **options)
        loss.item()  # waits for the device, which no capture may
        return loss

    learner.forward_backward = waiting  # type: ignore[method-assign]
    try:
        graphed(learner, batch)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:150]
    else:
        return "it did not fail"
    learner.forward_backward = compute  # type: ignore[method-assign]
    learner.drop_gradients()
    start.restore()
    torch.rand(1, device=learner.engine.device)
    return f"{said}; then: {apart(expected, train(learner, plain, [batch] * 3, 1))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="125m:amp,125m:te,350m:amp,350m:te")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--jobs", default="")
    parser.add_argument("--fail", action="store_true", help="also what a failed capture leaves")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    chosen.device = "cpu" if chosen.dry_run else "cuda"
    if chosen.dry_run:
        if chosen.fail:
            parser.error("--fail has a capture fail, and on a CPU there is none")
        vars(chosen).update(DRY)
    cases, jobs = (list(filter(None, part.split(","))) for part in (chosen.cases, chosen.jobs))
    # A job reads documents of its own.
    of_jobs = [case for case in CASES if not case.endswith("_packed")]
    for asked, known in ((cases, CASES), (jobs, of_jobs)):
        if unknown := [case for case in asked if case not in known]:
            parser.error(f"{unknown[0]} is none of {', '.join(known)}")
    results = []
    for case in cases:
        shape, name = case.split(":")
        try:
            found = row(shape, name, chosen)
        # The other cases are worth having.
        except Exception:
            found = {"shape": shape, "row": name, "error": traceback.format_exc()[-2000:]}
        results.append(found)
        print(json.dumps(found), flush=True)
        if chosen.out is not None:
            chosen.out.write_text(json.dumps(results, indent=1))
        gc.collect()
    for case in jobs:
        shape, name = case.split(":")
        for graphs in ("off", "auto"):
            print(json.dumps(job(shape, name, chosen, graphs)), flush=True)
            gc.collect()
    if chosen.fail:
        work = work_of(chosen, "60m", real_text(3, 2, 1024))
        learner = assembled(work, **CHANGES["te"])
        print("a failed capture:", failed_capture(learner, batches_of(work, False)[0]))
    # The floor uses PyTorch's cuDNN, behind which Transformer Engine may find another one loaded.
    for found in results:
        if "error" not in found:
            found |= shares(found, chosen)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1))
    if any("error" in found for found in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
