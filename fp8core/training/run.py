"""A whole run: built, resumed where there is a checkpoint, trained, exported and reported."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8core import engines
from fp8core.data.dataset import TrainingData
from fp8core.data.prefetch import PrefetchedBatches
from fp8core.data.tokenizers import Tokenizer
from fp8core.durable import write_json
from fp8core.models import LoadedModel, export, publish
from fp8core.spec.job import JobSpec
from fp8core.spec.outcomes import Outcome, Reason
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.assemble import announce_conversion, assemble
from fp8core.training.build import Places, build_on_ranks
from fp8core.training.checkpoint import CheckpointStore, LoadedCheckpoint
from fp8core.training.checkpoint_room import check_checkpoint_room
from fp8core.training.device import check_ranks, choose_device
from fp8core.training.digest import digest
from fp8core.training.loop import TrainingLoop
from fp8core.training.merged_export import merged_with_source
from fp8core.training.outcome import RunResult
from fp8core.training.parity import reference_losses
from fp8core.training.position import Position
from fp8core.training.precision import dtype_of
from fp8core.training.ranks.place import RankPlace
from fp8core.training.ranks.world import SOLO, join
from fp8core.training.report import RunFacts, make_report
from fp8core.training.run_parts import RunParts
from fp8core.training.state import kept_small_gemms, model_tensors, restore
from fp8core.training.stopping import StopRequest, StopRequested
from fp8core.training.trial import try_out
from fp8core.training.workdir import Workdir

__all__ = ["OnFigures", "Run"]

OnFigures = Callable[[Position, Mapping[str, float]], None]


@dataclass(frozen=True)
class _Built:
    parts: RunParts
    position: Position
    loaded: LoadedModel
    tokenizer: Tokenizer


class Run:
    """One run of a spec in an open workdir. ``step`` says how far it came, also after an error.

    ``place``: which of several ranks this process is; None for a job of one. Rank 0 alone has the
    workdir open and writes.
    """

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
        place: RankPlace | None = None,
    ) -> None:
        self._spec = spec
        self._workdir = workdir
        self._telemetry = telemetry
        self._stop = stop
        self._places = places
        self._device = device
        self._on_figures = on_figures
        self._place = place
        self._world = SOLO
        self._position = Position()
        self._started = time.perf_counter()

    @property
    def step(self) -> int:
        return self._position.step

    def execute(self) -> RunResult:
        """Trains to the end or to a stop by request. Raises the ``TrainingError`` that ended it."""
        self._telemetry.phase("loading")
        check_ranks(self._spec, self._place)
        if self._place is None:
            return self._run(choose_device(self._spec, self._device))
        device = choose_device(self._spec, self._device, self._place.rank)
        patience = self._spec.resources.rank_timeout_seconds
        with join(self._place.rank, self._place.count, device, patience) as self._world:
            return self._run(device)

    def _run(self, device: torch.device) -> RunResult:
        try:
            built = self._build(device)
        except StopRequested:
            self._world.leave()
            return RunResult(Outcome.STOPPED, Reason.STOPPED_BY_REQUEST, "stopped by request", 0)
        loading_seconds = time.perf_counter() - self._started
        self._position = built.position
        with self._prefetched(built.parts.data, device) as data:
            parts = replace(built.parts, data=data)
            loop = TrainingLoop(parts, built.position, self._stop, self._on_figures)
            reason = loop.run()
        if reason == Reason.STOPPED_BY_REQUEST:
            detail = f"stopped by request after step {self.step}; a checkpoint was saved"
            return RunResult(Outcome.STOPPED, reason, detail, self.step)
        if self._world.main:
            self._telemetry.phase("saving")
            self._report(built, reason, loading_seconds, loop.graphs.to_json())
            if self._spec.checkpoint.final:
                self._export(built)
        detail = f"trained {self.step} steps"
        if reason == Reason.EARLY_STOPPED:
            position = self._position
            detail += (
                f"; {position.waited} evaluations in a row did not improve on "
                f"{position.best_loss} at step {position.best_step}"
            )
        return RunResult(Outcome.SUCCEEDED, reason, detail, self.step)

    @contextlib.contextmanager
    def _prefetched(self, data: TrainingData, device: torch.device) -> Iterator[TrainingData]:
        """The data with its batches made ahead of the loop, for as long as that runs."""
        at_once = self._spec.training.gradient_accumulation
        with PrefetchedBatches(
            data.train, device, at_once=at_once, interrupted=lambda: self._stop.requested
        ) as train:
            yield replace(data, train=train)

    def _build(self, device: torch.device) -> _Built:
        spec, telemetry, workdir, world = self._spec, self._telemetry, self._workdir, self._world
        checkpoints = None
        if world.main:
            workdir.adopt(spec)
            checkpoints = CheckpointStore(
                workdir.checkpoints,
                keep_last=spec.checkpoint.keep_last,
                keep_best=spec.checkpoint.keep_best,
            )
        checkpoint = self._newest(checkpoints)
        reference = self._reference(checkpoint, device)
        engine = engines.create(spec.recipe, device)
        random_state.seed_everything(spec.training.seed, device)
        with self._stop.interruptible():
            built = build_on_ranks(
                spec,
                self._places,
                world,
                workdir,
                device=device,
                dtype=dtype_of(spec.training.precision.weights),
                saved_tokenizer=None if checkpoint is None else checkpoint.path,
            )
            try_out(built.loaded, spec, engine.compute_dtype)
        telemetry.phase("converting")
        classes = len(built.data.class_labels or ())
        assembled = assemble(
            spec,
            engine,
            built.loaded,
            class_count=classes,
            world=world,
            small_gemms=None if checkpoint is None else kept_small_gemms(checkpoint),
        )
        small = assembled.conversion.small_gemms
        position = Position(small_gemms=None if small is None else small.kept)
        if reference is not None:
            position.parity = {"reference": reference, "own": [], "beyond_since": None}
        if checkpoint is not None:
            position = restore(checkpoint, assembled, built.data.train)
            telemetry.event(
                "resumed",
                f"goes on from the checkpoint of step {checkpoint.step}",
                {"step": checkpoint.step},
            )
        if world.several:
            world.same("weights", digest(sorted(model_tensors(assembled.learner.model).items())))
            world.same("place in the data", json.dumps(built.data.train.state_dict()))
        if world.main:
            check_checkpoint_room(spec, assembled.learner, assembled.adapter, workdir)
        announce_conversion(assembled.conversion, workdir, telemetry, 0, world)
        parts = RunParts(
            spec=spec,
            learner=assembled.learner,
            conversion=assembled.conversion,
            adapter=assembled.adapter,
            data=built.data,
            telemetry=telemetry,
            checkpoints=checkpoints,
            workdir=workdir,
        )
        return _Built(parts, position, built.loaded, built.tokenizer)

    def _reference(
        self, checkpoint: LoadedCheckpoint | None, device: torch.device
    ) -> list[float] | None:
        """The losses to compare with, where the spec wants some and the checkpoint has none."""
        if self._spec.training.parity is None or checkpoint is not None:
            return None
        return reference_losses(
            self._spec,
            self._workdir,
            self._telemetry,
            self._stop,
            places=self._places,
            device=device,
            world=self._world,
        )

    def _newest(self, checkpoints: CheckpointStore | None) -> LoadedCheckpoint | None:
        """The newest checkpoint that verifies; rank 0 looks, and tells the others."""
        if checkpoints is None:
            step = self._world.from_main(lambda: None)
            if step is None:
                return None
            return CheckpointStore.verified_elsewhere(self._workdir.checkpoints, step)
        checkpoint, skipped = checkpoints.load_newest()
        self._world.from_main(lambda: None if checkpoint is None else checkpoint.step)
        for item in skipped:
            path = self._workdir.relative(item.path)
            self._telemetry.event(
                "checkpoint_skipped",
                f"{path} does not verify: {item.reason}",
                {"step": item.step, "path": path, "reason": item.reason},
            )
        return checkpoint

    def _export(self, built: _Built) -> None:
        """Writes the model as a plain Hugging Face checkpoint; replaces one of an earlier run."""
        target, parts = self._workdir.model, built.parts
        wanted = self._spec.adapter
        if parts.adapter is not None and wanted is not None and wanted.export == "adapter":
            publish(target, parts.adapter.save, built.tokenizer)
        elif parts.adapter is not None and parts.conversion.base_weights is not None:
            whole = merged_with_source(
                self._spec,
                built.loaded,
                parts.adapter,
                tokenizer=built.tokenizer,
                class_labels=parts.data.class_labels,
                device=parts.engine.device,
            )
            export(whole, None, built.tokenizer, target)
        else:
            if parts.adapter is not None:
                parts.adapter.merge()
            export(parts.model, parts.conversion, built.tokenizer, target)
        self._telemetry.artifact("model", self._workdir.relative(target), self.step)

    def _report(
        self, built: _Built, reason: Reason, loading_seconds: float, graphs: dict[str, Any]
    ) -> None:
        assert built.parts.checkpoints is not None
        facts = RunFacts(
            spec=self._spec,
            position=self._position,
            reason=reason,
            engine=built.parts.engine,
            model=built.parts.model,
            conversion=built.parts.conversion,
            fresh_weights=built.loaded.fresh,
            checkpoints=built.parts.checkpoints,
            workdir=self._workdir,
            loading_seconds=loading_seconds,
            wall_seconds=time.perf_counter() - self._started,
            graphs=graphs,
        )
        write_json(self._workdir.report, make_report(facts))
        self._telemetry.artifact("report", self._workdir.relative(self._workdir.report), self.step)
