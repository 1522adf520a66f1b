"""How many FP8 copies of a weight are there until its backward pass."""

from __future__ import annotations

from fp8core.spec import JobSpec

__all__ = ["weight_copies"]


def weight_copies(spec: JobSpec) -> int:
    """Copies of a byte an element, of a converted layer's weight. torchao casts anew for each GEMM.

    Transformer Engine casts a weight in both orders (before Blackwell), and its formats with one
    scale keep but the order that dgrad reads, unless the cast serves the next micro-batch too. The
    layers of ``override_linear_precision`` keep both, and none where dgrad is in high precision.
    """
    recipe, training = spec.recipe, spec.training
    if recipe.engine != "te":
        return {"emulated": 1}.get(recipe.engine, 0)
    used_again = training.gradient_accumulation > 1 and not training.gradient_checkpointing
    override = getattr(recipe, "override_linear_precision", (False, False, False))
    if override[1]:
        return 0
    one_scale = recipe.scaling in ("delayed", "current")
    return 1 if one_scale and not used_again and not any(override) else 2
