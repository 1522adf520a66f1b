"""A whole run: built, resumed where there is a checkpoint, trained, exported and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fp8core import engines
from fp8core.conversion import ConversionReport, convert
from fp8core.data.tokenizers import Tokenizer
from fp8core.durable import PARTIAL_PREFIX, told_when_full, write_json
from fp8core.models import LoadedModel, export
from fp8core.spec.job import JobSpec
from fp8core.spec.outcomes import Outcome, Reason
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from fp8core.training.build import Places, build_data_and_model
from fp8core.training.checkpoint import CheckpointStore, LoadedCheckpoint
from fp8core.training.device import check_one_rank, choose_device
from fp8core.training.loop import RunParts, TrainingLoop
from fp8core.training.optimizer import AdamW, decays
from fp8core.training.outcome import RunResult
from fp8core.training.position import Position
from fp8core.training.precision import dtype_of, set_gradient_dtype
from fp8core.training.report import RunFacts, make_report
from fp8core.training.state import restore
from fp8core.training.stopping import StopRequest, StopRequested
from fp8core.training.tasks import create_task
from fp8core.training.workdir import Workdir

__all__ = ["OnFigures", "Run"]

OnFigures = Callable[[Position, Mapping[str, float]], None]


@dataclass(frozen=True)
class _Built:
    parts: RunParts
    position: Position
    loaded: LoadedModel
    conversion: ConversionReport
    tokenizer: Tokenizer


class Run:
    """One run of a spec in an open workdir. ``step`` says how far it came, also after an error."""

    def __init__(
        self,
        spec: JobSpec,
        workdir: Workdir,
        telemetry: TelemetryWriter,
        stop: StopRequest,
        *,
        places: Places,
        device: str = "auto",
        on_figures: OnFigures = lambda position, values: None,
    ) -> None:
        self._spec = spec
        self._workdir = workdir
        self._telemetry = telemetry
        self._stop = stop
        self._places = places
        self._device = device
        self._on_figures = on_figures
        self._position = Position()
        self._started = time.perf_counter()

    @property
    def step(self) -> int:
        return self._position.step

    def execute(self) -> RunResult:
        """Trains to the end or to a stop by request. Raises the ``TrainingError`` that ended it."""
        stopped = RunResult(Outcome.STOPPED, Reason.STOPPED_BY_REQUEST, "stopped by request", 0)
        try:
            built = self._build()
        except StopRequested:
            return stopped
        loading_seconds = time.perf_counter() - self._started
        self._position = built.position
        loop = TrainingLoop(built.parts, built.position, self._stop, self._on_figures)
        reason = loop.run()
        if reason == Reason.STOPPED_BY_REQUEST:
            detail = f"stopped by request after step {self.step}; a checkpoint was saved"
            return RunResult(Outcome.STOPPED, reason, detail, self.step)
        self._telemetry.phase("saving")
        self._report(built, reason, loading_seconds)
        self._export(built)
        detail = f"trained {self.step} steps"
        if reason == Reason.EARLY_STOPPED:
            position = self._position
            detail += (
                f"; {position.waited} evaluations in a row did not improve on "
                f"{position.best_loss} at step {position.best_step}"
            )
        return RunResult(Outcome.SUCCEEDED, reason, detail, self.step)

    def _build(self) -> _Built:
        spec, telemetry, workdir = self._spec, self._telemetry, self._workdir
        telemetry.phase("loading")
        check_one_rank(spec)
        workdir.adopt(spec)
        device = choose_device(spec, self._device)
        engine = engines.create(spec.recipe, device)
        random_state.seed_everything(spec.training.seed)
        checkpoints = CheckpointStore(
            workdir.checkpoints,
            keep_last=spec.checkpoint.keep_last,
            keep_best=spec.checkpoint.keep_best,
        )
        checkpoint = self._newest(checkpoints)
        with self._stop.interruptible():
            built = build_data_and_model(
                spec,
                self._places,
                device=device,
                dtype=dtype_of(spec.training.precision.weights),
                saved_tokenizer=None if checkpoint is None else checkpoint.path,
            )
        self._keep_tokenizer_and_config(built.tokenizer, built.loaded)
        model = built.loaded.model

        telemetry.phase("converting")
        conversion = convert(model, engine, spec.conversion)
        model = conversion.model
        write_json(workdir.conversion, conversion.to_json())
        telemetry.artifact("conversion", workdir.relative(workdir.conversion), 0)

        set_gradient_dtype(model, dtype_of(spec.training.precision.gradients))
        if spec.training.gradient_checkpointing:
            enable_gradient_checkpointing(model, engine)
        engine.prepare(model)
        optimizer = _optimizer(spec, model)
        parts = RunParts(
            spec=spec,
            model=model,
            engine=engine,
            optimizer=optimizer,
            task=create_task(spec.task, class_count=len(built.data.class_labels or ())),
            data=built.data,
            telemetry=telemetry,
            checkpoints=checkpoints,
            workdir=workdir.path,
            checkpoint_extra=workdir.tokenizer,
        )
        position = Position()
        if checkpoint is not None:
            position = restore(checkpoint, model, optimizer, engine, built.data.train)
            telemetry.event(
                "resumed",
                f"goes on from the checkpoint of step {checkpoint.step}",
                {"step": checkpoint.step},
            )
        return _Built(parts, position, built.loaded, conversion, built.tokenizer)

    def _newest(self, checkpoints: CheckpointStore) -> LoadedCheckpoint | None:
        checkpoint, skipped = checkpoints.load_newest()
        for item in skipped:
            path = self._workdir.relative(item.path)
            self._telemetry.event(
                "checkpoint_skipped",
                f"{path} does not verify: {item.reason}",
                {"step": item.step, "path": path, "reason": item.reason},
            )
        return checkpoint

    def _keep_tokenizer_and_config(self, tokenizer: Tokenizer, loaded: LoadedModel) -> None:
        target = self._workdir.tokenizer
        if target.is_dir():
            return
        partial = target.with_name(f"{PARTIAL_PREFIX}tokenizer")
        with told_when_full(target):
            partial.mkdir()
            tokenizer.save(partial)
            loaded.config.save_pretrained(partial)
            partial.rename(target)

    def _export(self, built: _Built) -> None:
        """Writes the model as a plain Hugging Face checkpoint; replaces one of an earlier run."""
        target = self._workdir.model
        export(built.parts.model, built.conversion, built.tokenizer, target)
        self._telemetry.artifact("model", self._workdir.relative(target), self.step)

    def _report(self, built: _Built, reason: Reason, loading_seconds: float) -> None:
        facts = RunFacts(
            spec=self._spec,
            position=self._position,
            reason=reason,
            engine=built.parts.engine,
            model=built.parts.model,
            conversion=built.conversion,
            fresh_weights=built.loaded.fresh,
            checkpoints=built.parts.checkpoints,
            workdir=self._workdir,
            loading_seconds=loading_seconds,
            wall_seconds=time.perf_counter() - self._started,
        )
        write_json(self._workdir.report, make_report(facts))
        self._telemetry.artifact("report", self._workdir.relative(self._workdir.report), self.step)


def _optimizer(spec: JobSpec, model: torch.nn.Module) -> AdamW:
    wanted, precision = spec.training.optimizer, spec.training.precision
    return AdamW(
        model.named_parameters(),
        decayed=decays(model),
        lr=wanted.lr,
        betas=wanted.betas,
        eps=wanted.eps,
        weight_decay=wanted.weight_decay,
        state_dtype=dtype_of(precision.optimizer_states),
        master_weights=precision.master_weights == "fp32",
        seed=spec.training.seed,
    )
