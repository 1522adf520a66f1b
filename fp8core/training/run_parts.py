"""Everything that a run is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from fp8core.conversion import ConversionReport
from fp8core.data.dataset import TrainingData
from fp8core.engines.protocol import Engine
from fp8core.spec.job import JobSpec
from fp8core.telemetry import TelemetryWriter
from fp8core.training.checkpoint import CheckpointStore
from fp8core.training.learner import Learner
from fp8core.training.ranks.world import World
from fp8core.training.workdir import Workdir

if TYPE_CHECKING:
    from fp8core.training.adapter import Adapter

__all__ = ["RunParts"]


@dataclass(frozen=True)
class RunParts:
    """Built and, where there was a checkpoint, restored."""

    spec: JobSpec
    learner: Learner
    conversion: ConversionReport
    adapter: Adapter | None
    data: TrainingData
    telemetry: TelemetryWriter
    checkpoints: CheckpointStore | None
    """None on ranks that do not write."""
    workdir: Workdir

    @property
    def model(self) -> nn.Module:
        return self.learner.model

    @property
    def engine(self) -> Engine:
        return self.learner.engine

    @property
    def world(self) -> World:
        return self.learner.world
