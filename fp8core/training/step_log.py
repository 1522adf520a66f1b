"""What is told of each step: its figures, its speed, and how far the run has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fp8core.errors import Diverged
from fp8core.training.attention_format import AttentionFormat
from fp8core.training.late_metrics import StepFigures
from fp8core.training.memory import peak_bytes
from fp8core.training.parity import ParityTracker
from fp8core.training.position import Position
from fp8core.training.run_parts import RunParts

__all__ = ["StepLog"]

# An fp16 loss scale below this has been halved for 40 overflows in a row: no step will ever count.
_SMALLEST_LOSS_SCALE = 2.0**-24


class StepLog:
    """Records the steps of ``parts``. ``on_figures`` sees the figures of every logged step."""

    def __init__(
        self,
        parts: RunParts,
        position: Position,
        attention: AttentionFormat,
        on_figures: Callable[[Position, Mapping[str, float]], None],
    ) -> None:
        self._parts = parts
        self._position = position
        self._attention = attention
        self._on_figures = on_figures
        self._parity = ParityTracker(parts.spec, position, parts.telemetry)
        self._logged = (position.step, position.tokens, position.seconds)
        self._last_speed: dict[str, float] = {}

    def record(self, figures: StepFigures | None) -> None:
        """Records the figures of a step that have been judged; None: of none.

        Raises ``Diverged`` where every step overflows in fp16.
        """
        if figures is None:
            return
        spec, position = self._parts.spec, self._position
        engine, telemetry = self._parts.engine, self._parts.telemetry
        loss = figures.values["train/loss"]
        if math.isfinite(loss):
            position.note_loss(loss)
        compared = self._parity.note(figures.step, loss)
        if figures.step % spec.telemetry.log_every_steps and figures.step != 1:
            return
        values = dict(figures.values)
        engine_figures = engine.metrics()
        if engine_figures.get("amp/loss_scale", 1.0) < _SMALLEST_LOSS_SCALE:
            raise Diverged(
                f"at step {figures.step} the loss scale has fallen to "
                f"{engine_figures['amp/loss_scale']}: every step overflows"
            )
        values.update(engine_figures)
        values.update(compared)
        values.update(self._attention.figures())
        values.update(self._speed())
        values["memory/peak_bytes"] = self._parts.world.largest(peak_bytes(engine.device))
        telemetry.record(figures.step, values)
        remaining = spec.training.steps - position.step
        telemetry.progress(
            position.step,
            spec.training.steps,
            position.tokens,
            round(remaining * values["perf/step_seconds"], 3),
        )
        self._on_figures(position, values)

    def _speed(self) -> dict[str, float]:
        """Since the last logged step, with the wait for data, without evaluations and saving."""
        position = self._position
        step, tokens, seconds = self._logged
        # On a GPU the last figures arrive when no further step has passed: the last speed holds.
        if position.step > step:
            self._logged = (position.step, position.tokens, position.seconds)
            passed = max(position.seconds - seconds, 1e-9)
            self._last_speed = {
                "perf/step_seconds": passed / (position.step - step),
                "perf/tokens_per_second": (position.tokens - tokens) / passed,
            }
        return self._last_speed
