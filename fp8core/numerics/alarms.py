"""When FP8 scaling goes wrong: a scale that no longer follows its tensor, a tensor cut off.

The figures of recorded steps come in (``fp8/<layer>/<tensor>/<figure>``), alarms go out, each once
when it sets in and again only after it has been clear. With delayed scaling three things are said:

* ``infinite_amax``: an infinity sits in the amax history. ``max`` over a window with an infinity
  gives no scale, so the scale is held until the infinity has left it.
* ``frozen_scale``: the scale has stayed the same to the bit although it had to change, because
  - an amax exceeded what the scale can hold, ``amax * scale > FP8_MAX``, and ``interval`` updates
    or more have passed since: any scale made from a window with that amax in it is smaller; or
  - every recorded amax used less than 1/16 of the range that the scale leaves,
    ``FP8_MAX / 2^margin``, for longer than the history reaches back. Steps between recorded ones
    are not seen, and 16 leaves room for amaxes that went up in them.
* ``saturation``: more than the threshold of a tensor's elements lay beyond the format's maximum.

Scales that are made from the tensor itself cannot freeze; for them there is ``saturation`` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Alarm", "AlarmKind", "FP8Alarms", "FollowedScales"]

AlarmKind = Literal["infinite_amax", "frozen_scale", "saturation"]

SATURATION_THRESHOLD = 0.01
_TOO_SMALL = 1 / 16
_ROUNDING = 1 + 2.0**-10  # an amax at the very limit is not beyond it


@dataclass(frozen=True)
class Alarm:
    """One thing that set in at a recorded step. ``tensor``: input, weight or grad_output, or one
    of those of attention in FP8."""

    kind: AlarmKind
    layer: str
    tensor: str
    step: int
    message: str


@dataclass(frozen=True)
class FollowedScales:
    """What delayed scaling promises: how soon a scale follows its tensor.

    ``updates_per_step``: micro-batches of an optimizer step, the fewest in which the tensor is
    cast. ``backward_max`` is FP8_MAX of the gradients' format; forward tensors are E4M3.
    """

    amax_history_len: int
    interval: int
    margin: int
    updates_per_step: int
    backward_max: float

    def fp8_max(self, tensor: str) -> float:
        return self.backward_max if tensor.startswith("grad_") else 448.0


@dataclass
class _Watched:
    """One tensor since its scale was last seen to change."""

    scale: float
    since: int
    largest: float = 0.0
    exceeded_at: int | None = None


class FP8Alarms:
    """Watches the tensors of one run. ``scales`` None: they are made anew at each cast."""

    def __init__(
        self, scales: FollowedScales | None, saturation_threshold: float = SATURATION_THRESHOLD
    ) -> None:
        self._scales = scales
        self._threshold = saturation_threshold
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._sounding: set[tuple[AlarmKind, str, str]] = set()

    def observe(self, step: int, health: Mapping[str, float]) -> list[Alarm]:
        """The alarms that set in at ``step``; steps must come in increasing order."""
        tensors: dict[tuple[str, str], dict[str, float]] = {}
        for key, value in health.items():
            # A layer's name may hold any character; figure and tensor are the last two parts.
            path, _, figure = key.removeprefix("fp8/").rpartition("/")
            layer, _, tensor = path.rpartition("/")
            tensors.setdefault((layer, tensor), {})[figure] = value
        alarms: list[Alarm] = []
        for (layer, tensor), figures in tensors.items():
            found: dict[AlarmKind, str | None] = {
                "infinite_amax": self._infinite(figures),
                "frozen_scale": self._frozen(step, layer, tensor, figures),
                "saturation": self._saturated(figures),
            }
            for kind, message in found.items():
                sounding = (kind, layer, tensor)
                if message is None:
                    self._sounding.discard(sounding)
                elif sounding not in self._sounding:
                    self._sounding.add(sounding)
                    alarms.append(Alarm(kind, layer, tensor, step, f"{layer} {tensor}: {message}"))
        return alarms

    def _infinite(self, figures: Mapping[str, float]) -> str | None:
        count = figures.get("infinities", 0.0)
        if self._scales is None or not count:
            return None
        return (
            f"{count:.0f} of the last {self._scales.amax_history_len} amaxes are infinite; the "
            "scale may not change until they have left the history"
        )

    def _saturated(self, figures: Mapping[str, float]) -> str | None:
        fraction = figures.get("saturated", 0.0)
        if fraction <= self._threshold:
            return None
        return (
            f"{fraction:.2%} of the elements lay beyond the largest FP8 number and were cut off "
            f"(amax {figures.get('amax', math.nan):.4g}, "
            f"scale {figures.get('scale', math.nan):.4g})"
        )

    def _frozen(
        self, step: int, layer: str, tensor: str, figures: Mapping[str, float]
    ) -> str | None:
        rules = self._scales
        if rules is None or "amax" not in figures or "scale" not in figures:
            return None
        amax, scale = figures["amax"], figures["scale"]
        watched = self._watched.get((layer, tensor))
        if watched is None or watched.scale != scale:
            watched = self._watched[layer, tensor] = _Watched(scale, step)
        limit = rules.fp8_max(tensor)
        message = None
        if watched.exceeded_at is not None:
            updates = (step - watched.exceeded_at) * rules.updates_per_step
            if updates >= rules.interval:
                message = (
                    f"the scale is still {scale:.4g}, {updates} updates after an amax of "
                    f"{watched.largest:.4g} exceeded the {limit / scale:.4g} that it can hold"
                )
        if not math.isnan(amax):
            watched.largest = max(watched.largest, amax)
        if watched.exceeded_at is None and amax * scale > limit * _ROUNDING:
            watched.exceeded_at = step
        if message is not None:
            return message
        updates = (step - watched.since) * rules.updates_per_step
        used = watched.largest * scale / (limit * 2.0**-rules.margin)
        if updates >= rules.amax_history_len + rules.interval and 0 < used < _TOO_SMALL:
            return (
                f"the scale has been {scale:.4g} for {updates} updates, longer than the history "
                f"of {rules.amax_history_len}, while the amaxes used {used:.2%} of its range"
            )
        return None
