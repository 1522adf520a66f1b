"""The training loop: steps, evaluation, checkpoints, early stopping, and stopping by request.

A step of the run is: forward and backward of every micro-batch, clipping, the optimizer. After it,
in this order: evaluation if due, checkpoint if due. The same decisions are taken when a run goes on
from a checkpoint, from what the checkpoint says is already done, so that an interrupted run and one
that was not are the same from the first step to the last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8core.data.batch import Batch
from fp8core.data.dataset import TrainingData
from fp8core.engines.protocol import Engine
from fp8core.errors import DataInvalid, Diverged
from fp8core.spec.job import JobSpec
from fp8core.spec.outcomes import Reason
from fp8core.telemetry import TelemetryWriter
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.evaluation import evaluate
from fp8core.training.forward import logits_of
from fp8core.training.fp8_health import FP8Health
from fp8core.training.late_metrics import LateMetrics, StepFigures
from fp8core.training.memory import peak_bytes
from fp8core.training.optimizer import AdamW, clip_by_global_norm
from fp8core.training.position import Position
from fp8core.training.schedule import learning_rate_factor
from fp8core.training.state import capture_state, capture_tensors
from fp8core.training.stopping import StopRequest
from fp8core.training.tasks import Task

__all__ = ["RunParts", "TrainingLoop"]

# An fp16 loss scale below this has been halved for 40 overflows in a row: no step will ever count.
_SMALLEST_LOSS_SCALE = 2.0**-24


@dataclass(frozen=True)
class RunParts:
    """Everything a run is made of, built and, where there was a checkpoint, restored."""

    spec: JobSpec
    model: nn.Module
    engine: Engine
    optimizer: AdamW
    task: Task
    data: TrainingData
    telemetry: TelemetryWriter
    checkpoints: CheckpointStore
    workdir: Path
    checkpoint_extra: Path
    """Config and tokenizer, saved along so that a checkpoint is a model of its own."""


class TrainingLoop:
    """Runs ``parts`` from ``position`` on. ``on_figures`` sees the figures of every logged step."""

    def __init__(
        self,
        parts: RunParts,
        position: Position,
        stop: StopRequest,
        on_figures: Callable[[Position, Mapping[str, float]], None] = lambda position, values: None,
    ) -> None:
        self.position = position
        self._parts = parts
        self._spec = parts.spec
        self._training = parts.spec.training
        self._stop = stop
        self._on_figures = on_figures
        self._late = LateMetrics(parts.engine.device)
        self._health = FP8Health(parts.spec, parts.engine, parts.telemetry)
        self._trainable = [p for p in parts.model.parameters() if p.requires_grad]
        self._data_ended = False
        self._saved_step = position.step  # a run that goes on starts from a checkpoint of its step
        self._logged = (position.step, position.tokens, position.seconds)

    def run(self) -> Reason:
        """Trains to the end. Returns why it ended: completed, early stopped or stopped by request.

        Raises ``Diverged``, ``StorageFull``, ``DataInvalid``.
        """
        self._parts.model.train()
        self._parts.telemetry.phase("training")
        while True:
            if self.position.step > 0:
                self._after_step()
            reason = self._reason_to_end()
            if reason is not None:
                break
            batches = self._next_batches()
            if batches:
                self._step(batches)
        self._settle(self._late.flush())
        self._save("stop" if reason == Reason.STOPPED_BY_REQUEST else "final")
        return reason

    # One step

    def _next_batches(self) -> list[Batch]:
        batches: list[Batch] = []
        while len(batches) < self._training.gradient_accumulation:
            batch = next(self._parts.data.train, None)
            if batch is None:
                self._data_ended = True
                break
            batches.append(batch)
        return batches

    def _step(self, batches: list[Batch]) -> None:
        parts, engine, optimizer = self._parts, self._parts.engine, self._parts.optimizer
        started = time.perf_counter()
        step = self.position.step + 1
        target_counts = [parts.task.target_count(batch) for batch in batches]
        targets = sum(target_counts)
        if targets == 0:
            raise DataInvalid(
                f"step {step} has nothing to predict: every target lies beyond "
                f"{self._training.sequence_length} tokens or was left out",
                pointer="/training/sequence_length",
            )
        with_health = self._health.is_due(step)
        # Kept casts of the weights cost memory, which a run that recomputes has none to spare of.
        keep_casts = len(batches) > 1 and not self._training.gradient_checkpointing
        scaler = engine.gradient_scaler
        loss = torch.zeros((), device=engine.device)
        for number, batch in enumerate(batches, start=1):
            if with_health and number == len(batches):
                self._health.begin()
            there = batch.to(engine.device, non_blocking=True)
            with engine.training_context(number == 1 if keep_casts else None):
                share = parts.task.loss_sum(logits_of(parts.model, there, engine), there) / targets
            (share if scaler is None else scaler.scale(share)).backward()
            engine.after_backward()
            loss += share.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        norm = clip_by_global_norm(gradients, self._training.max_grad_norm)
        factor = learning_rate_factor(self._training.schedule, step, self._training.steps)
        lr = self._training.optimizer.lr * factor
        figures = {"train/loss": loss, "train/grad_norm": norm}
        # On a CPU this is where a bad step is found, before the weights take any of it.
        settled = self._late.push(step, figures, {"train/lr": lr})
        if settled is not None and settled.step == step:
            self._check_finite(settled)
        optimizer.set_learning_rate(lr)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

        self.position.step = step
        self.position.tokens += sum(batch.token_count for batch in batches)
        self.position.seconds += time.perf_counter() - started
        self._settle(settled)
        if with_health:
            self._health.end(step)

    def _check_finite(self, figures: StepFigures) -> None:
        loss = figures.values["train/loss"]
        if not math.isfinite(loss):
            raise Diverged(f"the loss of step {figures.step} is {loss}")
        norm = figures.values["train/grad_norm"]
        # With a loss scale an overflow is expected now and then: that step is skipped.
        if self._parts.engine.gradient_scaler is None and not math.isfinite(norm):
            raise Diverged(
                f"the gradients of step {figures.step} are not finite (their norm is {norm}), "
                f"at a loss of {loss}"
            )

    def _settle(self, figures: StepFigures | None) -> None:
        """Checks and records the figures of a step that have arrived."""
        if figures is None:
            return
        self._check_finite(figures)
        self.position.note_loss(figures.values["train/loss"])
        if figures.step % self._spec.telemetry.log_every_steps and figures.step != 1:
            return
        values = dict(figures.values)
        engine_figures = self._parts.engine.metrics()
        if engine_figures.get("amp/loss_scale", 1.0) < _SMALLEST_LOSS_SCALE:
            raise Diverged(
                f"at step {figures.step} the loss scale has fallen to "
                f"{engine_figures['amp/loss_scale']}: every step overflows"
            )
        values.update(engine_figures)
        values.update(self._speed())
        values["memory/peak_bytes"] = float(peak_bytes(self._parts.engine.device))
        telemetry = self._parts.telemetry
        telemetry.metrics(figures.step, values)
        remaining = self._training.steps - self.position.step
        telemetry.progress(
            self.position.step,
            self._training.steps,
            self.position.tokens,
            round(remaining * values["perf/step_seconds"], 3),
        )
        self._on_figures(self.position, values)

    def _speed(self) -> dict[str, float]:
        """Since the last logged step; evaluations and saving are not counted."""
        position = self.position
        step, tokens, seconds = self._logged
        self._logged = (position.step, position.tokens, position.seconds)
        passed = max(position.seconds - seconds, 1e-9)
        return {
            "perf/step_seconds": passed / max(position.step - step, 1),
            "perf/tokens_per_second": (position.tokens - tokens) / passed,
        }

    # Between steps

    def _reason_to_end(self) -> Reason | None:
        early = self._training.early_stopping
        if early is not None and self.position.waited >= early.patience:
            return Reason.EARLY_STOPPED
        if self.position.step >= self._training.steps or self._data_ended:
            # A stop during the last evaluation leaves it undone: that is for the next run.
            if self._evaluation_is_due(at_end=True):
                self._evaluate()
            return Reason.STOPPED_BY_REQUEST if self._stop_pending() else Reason.COMPLETED
        return Reason.STOPPED_BY_REQUEST if self._stop.requested else None

    def _stop_pending(self) -> bool:
        return self._stop.requested and self._evaluation_is_due(at_end=True)

    def _evaluation_is_due(self, *, at_end: bool = False) -> bool:
        position, every = self.position, self._spec.evaluation.every_steps
        if self._parts.data.evaluation is None or position.evaluated_step == position.step:
            return False
        return at_end or (every > 0 and position.step % every == 0)

    def _after_step(self) -> None:
        if self._evaluation_is_due():
            self._evaluate()
        every = self._spec.checkpoint.every_steps
        if every > 0 and self.position.step % every == 0:
            self._save("final" if self.position.step == self._training.steps else "periodic")

    def _evaluate(self) -> None:
        self._settle(self._late.flush())
        parts, position = self._parts, self.position
        assert parts.data.evaluation is not None
        parts.telemetry.phase("evaluating")
        figures = evaluate(
            parts.model,
            parts.engine,
            parts.task,
            parts.data.evaluation,
            text_bytes=parts.data.evaluation_bytes,
            interrupted=lambda: self._stop.requested,
        )
        parts.telemetry.phase("training")
        if not figures:
            return
        if not math.isfinite(figures["eval/loss"]):
            raise Diverged(f"the evaluation loss at step {position.step} is {figures['eval/loss']}")
        early = self._training.early_stopping
        position.note_evaluation(figures, early.min_delta if early is not None else 0.0)
        parts.telemetry.metrics(position.step, figures)
        self._on_figures(position, figures)
        if parts.checkpoints.among_best(figures["eval/loss"]):
            self._save("periodic")

    def _save(self, kind: str) -> None:
        """Saves the present step, unless that is done; then drops what is not to be kept."""
        position, parts = self.position, self._parts
        if position.step == 0 or self._saved_step == position.step:
            return
        self._settle(self._late.flush())
        parts.telemetry.phase("saving")
        metric = None
        if position.evaluated_step == position.step:
            metric = position.last_evaluation["eval/loss"]
        saved = parts.checkpoints.save(
            position.step,
            tensors=capture_tensors(parts.model, parts.optimizer, parts.engine),
            state=capture_state(position, parts.data.train),
            metric=metric,
            extra=parts.checkpoint_extra,
        )
        self._saved_step = position.step
        best = parts.checkpoints.best()
        relative = saved.path.relative_to(parts.workdir).as_posix()
        parts.telemetry.checkpoint(
            position.step,
            relative,
            kind=kind,
            best=best is not None and best.step == saved.step,
            metric=metric,
        )
        parts.telemetry.artifact("checkpoint", relative, position.step)
        for removed in parts.checkpoints.prune():
            gone: dict[str, Any] = {
                "step": removed.step,
                "path": removed.path.relative_to(parts.workdir).as_posix(),
            }
            parts.telemetry.event("checkpoint_removed", f"{gone['path']} is not kept", gone)
        parts.telemetry.phase("training")
