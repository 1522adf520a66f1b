"""The training loop: steps, evaluation, checkpoints, early stopping, and stopping by request.

A step of the run is: forward and backward of every micro-batch, clipping, a judgement on the
figures, the optimizer. After it, in this order: evaluation if due, checkpoint if due. The same
decisions are taken when a run goes on from a checkpoint, from what the checkpoint says is already
done, so that an interrupted run and one that was not are the same from the first step to the last.

Several ranks run this loop in step. All that decides is the same on all of them: the figures of a
step and of an evaluation are sums over the ranks, a stop is agreed on between two steps, and what
only rank 0 knows (its checkpoints) it tells the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from fp8core.data.batch import Batch
from fp8core.data.prefetch import AheadBatches
from fp8core.errors import Diverged
from fp8core.spec.outcomes import Reason
from fp8core.training.assemble import announce_conversion
from fp8core.training.attention_format import AttentionFormat
from fp8core.training.divergence import DivergenceGuard, Verdict
from fp8core.training.evaluation import evaluate
from fp8core.training.fp8_health import FP8Health
from fp8core.training.late_metrics import LateMetrics, StepFigures
from fp8core.training.learner import StepTotals
from fp8core.training.position import Position
from fp8core.training.precision_table import PrecisionTable
from fp8core.training.run_parts import RunParts
from fp8core.training.saving import Saver
from fp8core.training.step_batches import StepBatches
from fp8core.training.step_graphs import StepGraphs, graph_refusal
from fp8core.training.step_log import StepLog
from fp8core.training.stopping import StopRequest

__all__ = ["TrainingLoop"]


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
        self._world = parts.world
        self._on_figures = on_figures
        self._guard = DivergenceGuard(
            self._training.on_divergence,
            parts.learner,
            parts.conversion,
            position,
            parts.telemetry,
            self._conversion_changed,
        )
        self._late = LateMetrics(late=self._guard.late)
        self.graphs = StepGraphs(
            graph_refusal(parts.spec, parts.learner, parts.conversion),
            parts.learner,
            parts.telemetry,
            lambda: self._late.waited_for_host,
        )
        self._health = FP8Health(parts.spec, parts.engine, parts.telemetry)
        self._attention = AttentionFormat(parts.conversion, parts.telemetry)
        self._log = StepLog(parts, position, self._attention, on_figures)
        self._table = PrecisionTable(parts.learner, parts.conversion, parts.telemetry)
        self._batches = StepBatches(parts.data.train, self._training.gradient_accumulation, stop)
        self._saver = Saver(
            parts.checkpoints,
            parts.learner,
            parts.adapter,
            self._batches,
            parts.telemetry,
            parts.workdir,
        )
        self._saved_step = position.step  # a run that goes on starts from a checkpoint of its step

    def run(self) -> Reason:
        """Trains to the end. Returns why it ended: completed, early stopped or stopped by request.

        All that was saved is on disk when it returns. Raises ``Diverged``, ``StorageFull``,
        ``DataInvalid``.
        """
        try:
            return self._train()
        except BaseException:
            self._saver.give_up()
            raise

    def _train(self) -> Reason:
        self._parts.model.train()
        self._parts.telemetry.phase("training")
        while True:
            if self.position.step > 0:
                self._after_step()
            reason = self._reason_to_end()
            if reason is not None:
                break
            # Who waits for data waits for it in a step: its speed is that of the run.
            started = time.perf_counter()
            batches = self._batches.take()
            if self._stop_is_wanted():
                reason = Reason.STOPPED_BY_REQUEST
                break
            if batches:
                self._step(batches, started)
            self._batches.done()
        self._settle()
        if reason == Reason.STOPPED_BY_REQUEST:
            self._save("stop")
        elif self._spec.checkpoint.final:
            self._save("final")
        self._saver.finish()
        return reason

    # One step

    def _step(self, batches: list[Batch], started: float) -> None:
        learner = self._parts.learner
        step = self.position.step + 1
        totals = learner.totals(step, batches)
        self._attention.note(step, batches)
        verdict = Verdict.REPEAT
        while verdict == Verdict.REPEAT:
            verdict, settled = self._try(step, batches, totals)
        learner.drop_gradients()
        self.position.step = step
        self.position.tokens += totals.tokens
        self.position.seconds += time.perf_counter() - started
        self._log.record(settled)
        if verdict == Verdict.TAKE and self._health.is_due(step):
            self._health.end(step)

    def _try(
        self, step: int, batches: list[Batch], totals: StepTotals
    ) -> tuple[Verdict, StepFigures | None]:
        """Computes a step, and takes it where its figures (on a GPU, perhaps later) are finite.

        Returns what became of it, and the figures that have arrived.
        """
        learner = self._parts.learner
        self._table.before_step(batches)
        self._guard.begin(step, batches)
        with_health = self._health.is_due(step)

        def before(number: int) -> None:
            if with_health and number == len(batches):
                self._health.begin()

        loss = self.graphs.gradients(step, batches, totals, with_health=with_health, before=before)
        self._table.after_backward()
        norm = learner.gradient_norm()
        figures = {"train/loss": loss, "train/grad_norm": norm}
        settled = self._late.push(step, figures, {"train/lr": learner.learning_rate(step)})
        self._health.settle()
        verdict = Verdict.TAKE if settled is None else self._guard.judge(settled)
        if verdict == Verdict.TAKE:
            learner.update(step, norm, unless=self._guard.bad(loss, norm))
            self._table.after_step(step, self._parts.workdir)
        return verdict, settled

    def _settle(self) -> None:
        """Waits for figures that have not arrived, checks and records them."""
        figures = self._late.flush()
        self._health.settle()
        if figures is not None:
            self._guard.judge(figures)
        self._log.record(figures)

    def _conversion_changed(self) -> None:
        parts = self._parts
        announce_conversion(
            parts.conversion,
            parts.workdir,
            parts.telemetry,
            self.position.step + 1,
            self._world,
        )

    # Between steps

    def _reason_to_end(self) -> Reason | None:
        early = self._training.early_stopping
        if early is not None and self.position.waited >= early.patience:
            return Reason.EARLY_STOPPED
        if self.position.step >= self._training.steps or self._batches.ended:
            # A stop during the last evaluation leaves it undone: that is for the next run.
            if self._evaluation_is_due(at_end=True):
                self._evaluate()
            return Reason.STOPPED_BY_REQUEST if self._stop_pending() else Reason.COMPLETED
        return None

    def _stop_is_wanted(self) -> bool:
        """Whether any rank was asked to stop: one answer for all ranks, at this very step."""
        return self._world.any(self._stop.requested)

    def _stop_pending(self) -> bool:
        return self._evaluation_is_due(at_end=True) and self._stop_is_wanted()

    def _evaluation_is_due(self, *, at_end: bool = False) -> bool:
        position, every = self.position, self._spec.evaluation.every_steps
        if self._parts.data.evaluation is None or position.evaluated_step == position.step:
            return False
        return at_end or (every > 0 and position.step % every == 0)

    def _after_step(self) -> None:
        self._saver.look()
        if self._evaluation_is_due():
            self._evaluate()
        every = self._spec.checkpoint.every_steps
        if every > 0 and self.position.step % every == 0:
            self._save("final" if self.position.step == self._training.steps else "periodic")

    def _evaluate(self) -> None:
        self._settle()
        parts, position = self._parts, self.position
        assert parts.data.evaluation is not None
        parts.telemetry.phase("evaluating")
        with AheadBatches(
            parts.data.evaluation, parts.engine.device, interrupted=lambda: self._stop.requested
        ) as batches:
            figures = evaluate(
                parts.model,
                parts.engine,
                parts.learner.task,
                batches,
                text_bytes=lambda: parts.data.evaluation_bytes,
                world=self._world,
                interrupted=self._stop_is_wanted,
            )
        parts.telemetry.phase("training")
        if not figures:
            return
        if not math.isfinite(figures["eval/loss"]):
            raise Diverged(f"the evaluation loss at step {position.step} is {figures['eval/loss']}")
        early = self._training.early_stopping
        position.note_evaluation(figures, early.min_delta if early is not None else 0.0)
        parts.telemetry.record(position.step, figures)
        self._on_figures(position, figures)
        if self._saver.among_best(figures["eval/loss"]):
            self._save("periodic")

    def _save(self, kind: str) -> None:
        """Saves the present step, unless that is done; then drops what is not to be kept."""
        if self.position.step == 0 or self._saved_step == self.position.step:
            return
        self._settle()
        self._saver.save(self.position, kind)
        self._saved_step = self.position.step
