"""Whether Transformer Engine can run a recipe here, by its own word; nothing is imported before."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from fp8core.engines.protocol import Availability
from fp8core.engines.te_attention_state import attention_obstacles

__all__ = ["availability"]

_OLDEST = (2, 20)


def availability(recipe: Any, device: torch.device) -> Availability:
    """Whether Transformer Engine can run ``recipe`` on ``device``; its own reasons where not."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Availability(False, ("Transformer Engine runs on CUDA devices only",))
    if importlib.util.find_spec("transformer_engine") is None:
        return Availability(False, ("Transformer Engine is not installed (see README, GPU nodes)",))
    version: str | None = None
    try:
        # The bare meta package raises RuntimeError, a missing library OSError or FileNotFoundError.
        import transformer_engine

        version = str(transformer_engine.__version__)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            reason = f"Transformer Engine {version} is too old; {needed} or later is needed"
            return Availability(False, (reason,), version)
        import transformer_engine.pytorch as te
    except Exception as error:
        return Availability(False, (f"Transformer Engine does not import: {error}",), version)
    checks: dict[str, Callable[..., tuple[bool, str]]] = {
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
        "block": te.is_fp8_block_scaling_available,
    }
    scaling = getattr(recipe, "scaling", "delayed")
    ok, reason = checks.get(scaling, te.is_fp8_available)(return_reason=True)
    reasons = [] if ok else [str(reason)]
    if getattr(recipe, "fp8_dpa", False):
        capability = torch.cuda.get_device_capability(device)
        reasons += attention_obstacles(scaling, capability, os.environ)
    return Availability(not reasons, tuple(reasons), version)
