"""Parity: the same training in high precision, and how far this run's losses lie from it.

The reference has the seed, the first weights, the data and the optimizer of the job and runs under
plain autocast (engine ``amp``). It comes first, in the same process: a process of its own would
have to be given roots, uploads, environment and stop signals again, to gain nothing. What it leaves
behind is put in order: memory is given back, and the seed is set anew before the job itself begins.
Its losses are kept in the workdir and in every checkpoint, so that no resumed run repeats it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from fp8core import engines
from fp8core.data.prefetch import PrefetchedBatches
from fp8core.durable import write_json
from fp8core.spec.job import JobSpec
from fp8core.spec.recipe import AmpRecipe
from fp8core.stored_json import read_object
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.assemble import assemble
from fp8core.training.build import Places, build_on_ranks
from fp8core.training.learner import Learner
from fp8core.training.position import Position
from fp8core.training.precision import dtype_of
from fp8core.training.ranks.world import SOLO, World
from fp8core.training.step_batches import StepBatches
from fp8core.training.stopping import StopRequest, StopRequested
from fp8core.training.trial import try_out
from fp8core.training.workdir import Workdir

__all__ = ["SMOOTHED_OVER", "ParityTracker", "parity_report", "reference_losses"]

SMOOTHED_OVER = 10
"""Steps over which losses are averaged before they are compared; all, where there are fewer."""


def reference_losses(
    spec: JobSpec,
    workdir: Workdir,
    telemetry: TelemetryWriter,
    stop: StopRequest,
    *,
    places: Places,
    device: torch.device,
    world: World = SOLO,
) -> list[float]:
    """The losses of the reference, trained now unless an earlier run of this workdir did.

    Fewer than asked for where the data ended, or where a loss was not finite. Raises what building
    and training raise, and ``StopRequested`` between two steps or for a wait for data.
    """
    parity = spec.training.parity
    assert parity is not None
    fingerprint = _fingerprint(spec)
    stored = world.from_main(lambda: _stored(workdir, fingerprint))
    if stored is not None:
        return list(stored)
    telemetry.phase("reference")
    recipe = AmpRecipe(engine="amp", dtype=parity.dtype)
    # The model as it is: the same fused kernels on both sides could be wrong on both.
    unfused = spec.conversion.model_copy(update={"fuse": "none"})
    adapter = spec.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"base_weights": None})
    plain = spec.model_copy(update={"recipe": recipe, "conversion": unfused, "adapter": adapter})
    try:
        losses = _train(
            plain, parity.steps, workdir, telemetry, stop, places=places, device=device, world=world
        )
    finally:
        # The job needs the memory, and reports its own peak.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    # The steps counted so far were the reference's.
    telemetry.progress(0, spec.training.steps, 0, None)
    if world.main:
        write_json(workdir.parity, {"fingerprint": fingerprint, "losses": losses})
    return losses


def _train(
    spec: JobSpec,
    steps: int,
    workdir: Workdir,
    telemetry: TelemetryWriter,
    stop: StopRequest,
    *,
    places: Places,
    device: torch.device,
    world: World,
) -> list[float]:
    engine = engines.create(spec.recipe, device)
    random_state.seed_everything(spec.training.seed, device)
    with stop.interruptible():
        built = build_on_ranks(
            spec,
            places,
            world,
            workdir,
            device=device,
            dtype=dtype_of(spec.training.precision.weights),
        )
        try_out(built.loaded, spec, engine.compute_dtype)
    classes = len(built.data.class_labels or ())
    learner = assemble(spec, engine, built.loaded, class_count=classes, world=world).learner
    learner.model.train()
    at_once = spec.training.gradient_accumulation
    with PrefetchedBatches(
        built.data.train, device, at_once=at_once, interrupted=lambda: stop.requested
    ) as train:
        return _losses(learner, StepBatches(train, at_once, stop), steps, telemetry, stop)


def _losses(
    learner: Learner,
    data: StepBatches,
    steps: int,
    telemetry: TelemetryWriter,
    stop: StopRequest,
) -> list[float]:
    losses: list[float] = []
    tokens, started = 0, time.perf_counter()
    for step in range(1, steps + 1):
        batches = data.take()
        if learner.world.any(stop.requested):
            raise StopRequested
        if not batches:
            break
        totals = learner.totals(step, batches)
        loss = float(learner.gradients(step, batches, totals=totals))
        norm = learner.gradient_norm()
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            telemetry.event(
                "reference_diverged",
                f"the reference in {learner.engine.name} ended before step {step}: its loss is "
                f"{loss}, the norm of its gradients {float(norm)}",
                {"step": step},
            )
            break
        learner.update(step, norm)
        losses.append(loss)
        # Whoever watches for a standstill must see that there is none.
        tokens += totals.tokens
        each = (time.perf_counter() - started) / step
        telemetry.progress(step, steps, tokens, round(each * (steps - step), 3))
    return losses


def _fingerprint(spec: JobSpec) -> str:
    """Of all in the spec that the reference depends on, and a little more."""
    resolved = spec.resolved()
    kept = ("model", "tokenizer", "data", "task", "adapter", "training", "evaluation")
    return hashlib.sha256(json.dumps([resolved[key] for key in kept]).encode()).hexdigest()


def _stored(workdir: Workdir, fingerprint: str) -> list[float] | None:
    found = read_object(workdir.parity) or {}
    losses = found.get("losses")
    if found.get("fingerprint") != fingerprint or not isinstance(losses, list):
        return None
    # Of a damaged one the reference is trained once more.
    return losses if all(type(loss) is float for loss in losses) else None


class ParityTracker:
    """Compares the loss of each step with the reference's, which lies in ``position.parity``."""

    def __init__(self, spec: JobSpec, position: Position, telemetry: TelemetryWriter) -> None:
        self._parity = spec.training.parity
        self._position = position
        self._telemetry = telemetry

    def note(self, step: int, loss: float) -> dict[str, float]:
        """Takes the loss of ``step`` into account; its metrics. An event where it is the first
        whose smoothed gap is beyond the bound."""
        state, parity = self._position.parity, self._parity
        if state is None or parity is None or step > len(state["reference"]):
            return {}
        own: list[float | None] = state["own"]
        own.extend([None] * (step - 1 - len(own)))
        own.append(loss if math.isfinite(loss) else None)
        reference = state["reference"][step - 1]
        window = min(SMOOTHED_OVER, len(state["reference"]))
        smoothed = None
        if step >= window:
            smoothed = _smoothed_gap(
                state["reference"][step - window : step], own[step - window : step]
            )
        if smoothed is not None and abs(smoothed) > parity.bound and not state["beyond_since"]:
            state["beyond_since"] = step
            self._telemetry.event(
                "parity_beyond",
                f"at step {step} the smoothed loss lies {smoothed:+.2%} from the reference in "
                f"{parity.dtype}, beyond the bound of {parity.bound:.2%}",
                {"step": step, "gap": smoothed, "bound": parity.bound},
            )
        return {
            "parity/reference_loss": reference,
            "parity/gap": (loss - reference) / reference if reference else math.nan,
        }


def parity_report(spec: JobSpec, position: Position) -> dict[str, Any] | None:
    """The verdict, and the curve it rests on; None where no reference was asked for.

    Gaps are relative, ``(loss - reference) / reference``. ``worst_smoothed_gap`` is the one of the
    largest size among the gaps of losses averaged over ten steps, ``mean_gap`` the mean of the gaps
    of single steps. ``verdict``: ``within`` or ``beyond`` the bound in either direction; null where
    there is nothing to compare.
    """
    parity, state = spec.training.parity, position.parity
    if parity is None or state is None:
        return None
    reference, own = state["reference"], state["own"]
    pairs = [(there, here) for there, here in zip(reference, own, strict=False) if here is not None]
    gaps = [(here - there) / there for there, here in pairs if there]
    window = min(SMOOTHED_OVER, len(reference))
    smoothed = {}
    for end in range(window, min(len(reference), len(own)) + 1):
        gap = _smoothed_gap(reference[end - window : end], own[end - window : end])
        if gap is not None:
            smoothed[end] = gap
    worst_step = max(smoothed, key=lambda step: abs(smoothed[step]), default=None)
    worst = None if worst_step is None else smoothed[worst_step]
    verdict = None
    if worst is not None:
        verdict = "within" if abs(worst) <= parity.bound else "beyond"
    return {
        "dtype": parity.dtype,
        "steps": parity.steps,
        "compared_steps": len(pairs),
        "bound": parity.bound,
        "smoothed_over": SMOOTHED_OVER,
        "worst_smoothed_gap": worst,
        "worst_step": worst_step,
        "mean_gap": fmean(gaps) if gaps else None,
        "verdict": verdict,
        "curve": {"reference_loss": reference, "loss": own},
    }


def _smoothed_gap(reference: Sequence[float], own: Sequence[float | None]) -> float | None:
    """The relative gap of the means; steps without a loss of their own are left out of both."""
    pairs = [(a, b) for a, b in zip(reference, own, strict=True) if b is not None]
    mean = fmean(pair[0] for pair in pairs) if pairs else 0.0
    return fmean(pair[1] for pair in pairs) / mean - 1.0 if mean else None
