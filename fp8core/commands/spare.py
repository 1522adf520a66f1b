"""``spare``: a trainer with everything imported that waits to be told what to train.

The imports take seconds; a service that keeps one spare ready starts a job without them. CUDA is
not touched before the order comes, so the order's environment may still say which GPU is visible.
Variables that libraries read while they are imported (such as HF_HUB_OFFLINE) must stand in the
environment of the spare itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fp8core.commands.imports import importing
from fp8core.commands.ranks import ranks_to_start, train_arguments
from fp8core.spec import ExitCode

__all__ = ["run_spare"]

_MAX_ORDER = 1 << 20


def run_spare(*, debug: bool = False) -> int:
    """Reads one JSON line on stdin and trains; 0 when stdin ends without one.

    A job of one rank trains in this process, which becomes the launcher for a job of several.

    The line: ``{"spec_path", "workdir", "roots": [...], "device", "job_folder", "upload_folder",
    "env": {...}}``, all but the first two optional.
    """
    with importing():
        _import_everything()
    line = sys.stdin.readline(_MAX_ORDER)
    if not line.strip():
        return int(ExitCode.OK)
    try:
        order = json.loads(line)
        spec_path, workdir = Path(order["spec_path"]), Path(order["workdir"])
        environment: dict[str, str] = order.get("env") or {}
        roots = [Path(root) for root in order.get("roots") or []]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"error: the order on stdin is not valid: {error!r}", file=sys.stderr)
        return int(ExitCode.INTERNAL_ERROR)
    os.environ.update(environment)
    wanted: dict[str, Any] = {
        "device": order.get("device") or "auto",
        "job_folder": _path(order.get("job_folder")),
        "upload_folder": _path(order.get("upload_folder")),
        "debug": debug,
    }
    if ranks_to_start(spec_path, roots) > 1:
        # The launcher of ranks takes the place of this process, whose imports it has no use for.
        arguments = train_arguments(spec_path, workdir, roots, **wanted)
        os.execv(sys.executable, [sys.executable, "-m", "fp8core", *arguments])
    if "OMP_NUM_THREADS" in environment:
        import torch

        # Read by torch at import, which is past.
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    from fp8core.commands.train import run_train

    return run_train(spec_path, workdir, roots, **wanted)


def _path(value: Any) -> Path | None:
    return Path(value) if value else None


def _import_everything() -> None:
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fp8core.commands.train
    import fp8core.engines
    import fp8core.models  # noqa: F401
    from fp8core.commands.quiet import quieten_libraries

    quieten_libraries()
