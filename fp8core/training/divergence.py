"""What becomes of a step whose loss or gradients are not finite (``training.on_divergence``).

``fail`` costs nothing: on a GPU the figures of a step arrive one step late, and until then a flag
on the device keeps the optimizer from taking over anything of a bad step. The other two must know
before the optimizer's step whether there will be one, so each step waits for the device once, and
the FP8 histories and scales are copied before it. On a CPU figures are never late, and all is as
exact as that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from fp8core.conversion import ConversionReport, restore_layers
from fp8core.data.batch import Batch
from fp8core.errors import Diverged
from fp8core.spec.training import OnDivergence
from fp8core.telemetry import TelemetryWriter, encode_number
from fp8core.training.diagnosis import Finding, find_first_bad
from fp8core.training.late_metrics import StepFigures
from fp8core.training.learner import Learner
from fp8core.training.position import Position

__all__ = ["DivergenceGuard", "Verdict"]


class Verdict(Enum):
    """What to do with the step that was judged."""

    TAKE = auto()
    SKIP = auto()
    REPEAT = auto()


@dataclass(frozen=True)
class _Start:
    """A step as it began. ``engine``: None where its state is not kept."""

    step: int
    batches: Sequence[Batch]
    random: _TorchRandom
    engine: Mapping[str, Tensor] | None


class DivergenceGuard:
    """Judges the figures of each step. ``on_fallback`` is called when layers have changed."""

    def __init__(
        self,
        wanted: OnDivergence,
        learner: Learner,
        conversion: ConversionReport,
        position: Position,
        telemetry: TelemetryWriter,
        on_fallback: Callable[[], None],
    ) -> None:
        self._wanted = wanted
        self._learner = learner
        self._conversion = conversion
        self._position = position
        self._telemetry = telemetry
        self._on_fallback = on_fallback
        self.late = wanted.action == "fail" and learner.engine.device.type == "cuda"
        """Whether figures may arrive after the optimizer's step."""
        self._starts: list[_Start] = []
        self._repeated_step = 0

    def begin(self, step: int, batches: Sequence[Batch]) -> None:
        """Before the first forward pass of ``step``."""
        engine = self._learner.engine
        state = None if self.late else dict(engine.state_dict())
        start = _Start(step, batches, _TorchRandom.capture(engine.device), state)
        self._starts = [*self._starts[-1:], start] if self.late else [start]

    def bad(self, loss: Tensor, norm: Tensor) -> Tensor | None:
        """1 where the step must change nothing, 0 else, on the device; None where that is known."""
        if not self.late or self._learner.engine.gradient_scaler is not None:
            return None
        return (~(torch.isfinite(loss) & torch.isfinite(norm))).float()

    def judge(self, figures: StepFigures) -> Verdict:
        """Raises ``Diverged``, which names step and layer, where the spec says so."""
        cause = self._cause(figures)
        if cause is None:
            self._position.skipped_in_a_row = 0
            return Verdict.TAKE
        start = next((start for start in self._starts if start.step == figures.step), None)
        finding, where = self._diagnose(start)
        if start is None or self._wanted.action == "fail":
            raise self._diverged(figures, f"{cause}; {where}", finding)
        if self._wanted.action == "skip_step":
            return self._skip(figures, cause, where, finding)
        return self._fall_back(start, figures, cause, where, finding)

    def _cause(self, figures: StepFigures) -> str | None:
        loss, norm = figures.values["train/loss"], figures.values["train/grad_norm"]
        if not math.isfinite(loss):
            return f"the loss of step {figures.step} is {loss}"
        # With a loss scale an overflow is expected now and then: that step is skipped.
        if self._learner.engine.gradient_scaler is None and not math.isfinite(norm):
            return (
                f"the gradients of step {figures.step} are not finite (their norm is {norm}), "
                f"at a loss of {loss}"
            )
        return None

    def _diagnose(self, start: _Start | None) -> tuple[Finding | None, str]:
        """Repeats the step; afterwards all is as it was before the step, but for random numbers."""
        if start is None:
            return None, "where it began is not known"
        now = _TorchRandom.capture(self._learner.engine.device)
        self._learner.engine.record_health(False)
        self._rewind(start)
        try:
            finding = find_first_bad(self._learner, start.step, start.batches)
        # What is known already must be told, whatever becomes of the search for more.
        except Exception as error:
            if self._learner.world.several:
                raise  # the others wait for this rank in the search
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return None, f"where it began could not be found ({text})"
        finally:
            self._rewind(start)
            now.restore()
        return finding, str(finding) if finding else "computed once more, the step is finite"

    def _rewind(self, start: _Start) -> None:
        start.random.restore()
        if start.engine is not None:
            self._learner.engine.load_state_dict(start.engine)

    def _skip(
        self, figures: StepFigures, cause: str, where: str, finding: Finding | None
    ) -> Verdict:
        position, most = self._position, self._wanted.max_consecutive
        if position.skipped_in_a_row >= most:
            text = f"{cause}; {where}; the {most} steps before it were skipped already"
            raise self._diverged(figures, text, finding)
        position.skipped_in_a_row += 1
        position.skipped += 1
        self._learner.drop_gradients()
        data = _data(figures, finding) | {"in_a_row": position.skipped_in_a_row}
        self._telemetry.event("step_skipped", f"{cause}; {where}; the step is skipped", data)
        return Verdict.SKIP

    def _fall_back(
        self,
        start: _Start,
        figures: StepFigures,
        cause: str,
        where: str,
        finding: Finding | None,
    ) -> Verdict:
        converted = list(self._conversion.converted_layers())
        layers = self._at_fault(finding) if self._repeated_step != start.step else []
        layers = layers or converted
        if not layers:
            text = f"{cause}; {where}; every layer is in high precision already"
            raise self._diverged(figures, text, finding)
        reason = f"put back into high precision at step {start.step}: {cause}; {where}"
        reasons = dict.fromkeys(layers, reason)
        restore_layers(self._conversion, reasons)
        self._position.fallback.update(reasons)
        named = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if layers[3:] else "")
        data = _data(figures, finding) | {
            "layers": layers,
            "remaining": len(converted) - len(layers),
        }
        text = f"{cause}; {where}; back to high precision: {named}; the step is repeated"
        self._telemetry.event("fallback_bf16", text, data)
        self._on_fallback()
        self._repeated_step = start.step
        start.random.restore()
        return Verdict.REPEAT

    def _at_fault(self, finding: Finding | None) -> list[str]:
        """The converted layers that are, or lie in, the module that was found."""
        if finding is None or not finding.layer:
            return []
        # What went bad in a frozen layer may show in the gradients of its adapter first.
        layer = re.split(r"\.lora_[AB]\.", finding.layer)[0]
        found = {id(m) for m in self._learner.model.get_submodule(layer).modules()}
        layers = self._conversion.converted_layers()
        return [name for name, layer in layers.items() if id(layer) in found]

    def _diverged(self, figures: StepFigures, text: str, finding: Finding | None) -> Diverged:
        self._telemetry.event("diverged", text, _data(figures, finding))
        error = Diverged(text)
        error.rank = None if finding is None else finding.rank
        return error


def _data(figures: StepFigures, finding: Finding | None) -> dict[str, object]:
    return {
        "step": figures.step,
        "loss": encode_number(figures.values["train/loss"]),
        "grad_norm": encode_number(figures.values["train/grad_norm"]),
        "layer": None if finding is None else finding.layer,
        "tensor": None if finding is None else finding.tensor,
        **({} if finding is None or finding.rank is None else {"rank": finding.rank}),
    }


@dataclass(frozen=True)
class _TorchRandom:
    """The state of torch's generators that a step draws from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> _TorchRandom:
        on_gpu = device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(torch.get_rng_state(), cuda, device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
