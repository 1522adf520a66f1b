"""From a spec's model reference to a module, and back to a plain Hugging Face checkpoint."""

from fp8core.models.export import export, publish
from fp8core.models.load import LoadedModel, load
from fp8core.models.plan import Plan, plan
from fp8core.models.source import ModelSource, locate

__all__ = [
    "LoadedModel",
    "ModelSource",
    "Plan",
    "export",
    "load",
    "locate",
    "plan",
    "publish",
]
