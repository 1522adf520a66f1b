"""Which jobs may have steps that are replayed as CUDA graphs, by their specs alone."""

from __future__ import annotations

from fp8core.spec.job import JobSpec

__all__ = ["TIMES_A_STEP", "graph_refusal"]

TIMES_A_STEP = 2
"""Graphs are captured where the GPU has so many times the memory of a step without them."""


def graph_refusal(spec: JobSpec) -> str | None:
    """Why no step of the job is replayed, whatever its model and its device are; or None."""
    training = spec.training
    if training.cuda_graphs == "off":
        return "training.cuda_graphs is off"
    if spec.task != "causal_lm":
        return f"steps of the task {spec.task} were not measured as a graph"
    if spec.adapter is not None:
        return "steps of adapters were not measured as a graph"
    if spec.resources.ranks > 1:
        return "several ranks train together"
    if training.gradient_accumulation > 1:
        return "training.gradient_accumulation is more than 1"
    if training.gradient_checkpointing:
        return "training.gradient_checkpointing"
    if training.on_divergence.action != "fail":
        return "training.on_divergence has the host wait for each step"
    return _of_recipe(spec)


def _of_recipe(spec: JobSpec) -> str | None:
    recipe = spec.recipe
    if recipe.engine == "amp":
        return None if recipe.dtype == "bf16" else f"steps in {recipe.dtype} were not measured so"
    if recipe.engine != "te" or recipe.scaling not in ("delayed", "current", "block"):
        how = recipe.engine if recipe.engine != "te" else f"scaling {recipe.scaling}"
        return f"steps with {how} were not measured as a graph"
    if any(getattr(recipe, "override_linear_precision", ())):
        return "steps with override_linear_precision were not measured as a graph"
    if getattr(recipe, "backward_override", None) is not None:
        return "steps with backward_override were not measured as a graph"
    if recipe.scaling == "delayed" and recipe.interval != 1:
        return "with recipe.interval the host counts the updates of scales"
    if getattr(recipe, "fp8_dpa", False):
        return "steps with attention in FP8 were not measured as a graph"
    return None
