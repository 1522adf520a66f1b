"""FP8 health on its way out of a run: figures as metrics, what is wrong with them as events.

On a GPU the figures of a step are taken up one step later, so that nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8core.engines.protocol import Engine
from fp8core.numerics.alarms import FollowedScales, FP8Alarms
from fp8core.numerics.casts import E4M3, E5M2
from fp8core.spec.job import JobSpec
from fp8core.spec.recipe import EmulatedDelayed, TEDelayed
from fp8core.telemetry import TelemetryWriter

__all__ = ["FP8Health"]


class FP8Health:
    """Records every ``telemetry.fp8_every_steps`` steps, the last micro-batch of the step."""

    def __init__(self, spec: JobSpec, engine: Engine, telemetry: TelemetryWriter) -> None:
        self._every = spec.telemetry.fp8_every_steps
        self._engine = engine
        self._telemetry = telemetry
        self._alarms = FP8Alarms(_followed_scales(spec))
        self._late = engine.device.type == "cuda"
        self._waiting: tuple[int, Callable[[], dict[str, float]]] | None = None

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def begin(self) -> None:
        """Before the forward pass that is to be recorded."""
        self._engine.record_health(True)

    def end(self, step: int) -> None:
        """After its backward pass: takes the figures of ``step``, for ``settle`` to write."""
        self._waiting = step, self._engine.health_later()
        self._engine.record_health(False)
        if not self._late:
            self.settle()

    def settle(self) -> None:
        """Writes the metrics that are still held, and an ``fp8_alarm`` for each alarm."""
        if self._waiting is None:
            return
        (step, read), self._waiting = self._waiting, None
        figures = read()
        self._telemetry.record(step, figures, health=True)
        for alarm in self._alarms.observe(step, figures):
            self._telemetry.event(
                "fp8_alarm",
                f"step {step}: {alarm.message}",
                {"step": step, "layer": alarm.layer, "tensor": alarm.tensor, "what": alarm.kind},
            )


def _followed_scales(spec: JobSpec) -> FollowedScales | None:
    recipe = spec.recipe
    if not isinstance(recipe, TEDelayed | EmulatedDelayed):
        return None
    # A weight whose cast is used again is cast once a step, however many micro-batches there are.
    once = recipe.engine == "te" and spec.training.gradient_accumulation > 1
    return FollowedScales(
        amax_history_len=recipe.amax_history_len,
        interval=recipe.interval,
        margin=recipe.margin,
        updates_per_step=1 if once else spec.training.gradient_accumulation,
        backward_max=E5M2.max if recipe.fp8_format == "HYBRID" else E4M3.max,
    )
