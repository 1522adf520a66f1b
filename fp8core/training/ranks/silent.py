"""The telemetry of a rank that reports nothing: one of them speaks for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8core.telemetry import TelemetryWriter

__all__ = ["SilentTelemetry"]


class SilentTelemetry(TelemetryWriter):
    """Takes every record and keeps none; has no file and no thread."""

    def __init__(self) -> None:
        """Nothing of a writer's own is made."""

    @property
    def last_seq(self) -> int:
        return 0

    @property
    def dropped(self) -> int:
        return 0

    def phase(self, phase: str) -> None: ...

    def record(self, step: int, values: Mapping[str, Any], *, health: bool = False) -> None: ...

    def progress(
        self, step: int, total_steps: int, tokens: int, eta_seconds: float | None
    ) -> None: ...

    def event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None: ...

    def checkpoint(
        self, step: int, path: str, *, kind: str, best: bool, metric: float | None
    ) -> None: ...

    def artifact(self, kind: str, path: str, step: int) -> None: ...

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None: ...
