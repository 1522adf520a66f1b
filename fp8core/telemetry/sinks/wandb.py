"""Weights & Biases, through its own package; offline it writes files that ``wandb sync`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from fp8core.telemetry.numbers import decode_number

__all__ = ["WandbSink"]


class WandbSink:
    """One run of the project that the spec names; later runs of a workdir go on with it.

    Every value is logged beside its step, as the metric ``step``: its own counter takes only steps
    that rise, and a resumed run repeats some.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        spec: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=settings["project"],
            name=spec.get("name"),
            mode=settings["mode"],
            dir=str(folder),
            id=state.get("run"),
            resume="allow" if state.get("run") else None,
            config=dict(spec),
            # The figures, and nothing else of this machine.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            if record["type"] == "metrics":
                values = {name: decode_number(value) for name, value in record["values"].items()}
                self._run.log({**values, "step": record["step"], "_timestamp": record["time"]})

    def state(self) -> dict[str, Any]:
        return {"run": self._run.id}

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in ("succeeded", "stopped") else 1)
        # The run's folder is kept as an artifact, and that takes no links; these lead to logs.
        for path in Path(self._run.dir).parent.rglob("*"):
            if path.is_symlink():
                path.unlink()
