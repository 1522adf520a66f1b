"""How many FP8 copies of a weight are there until its backward pass, and which stay longer."""

from __future__ import annotations

from collections import Counter

from torch import nn

from fp8core.spec import JobSpec

__all__ = ["copy_beside_cast", "keeps_casts", "shared_weights", "stores_base", "weight_copies"]


def stores_base(spec: JobSpec) -> bool:
    """Whether frozen weights of converted layers lie in FP8, so that nothing casts them."""
    return spec.adapter is not None and spec.adapter.base_weights == "fp8"


def shared_weights(model: nn.Module) -> frozenset[int]:
    """The ids of Parameters that several modules hold, which are never stored in FP8."""
    parameters = (p for module in model.modules() for p in module._parameters.values())
    held = Counter(id(parameter) for parameter in parameters if parameter is not None)
    return frozenset(key for key, count in held.items() if count > 1)


def weight_copies(spec: JobSpec, *, stored: bool | None = None) -> int:
    """Copies of a byte an element, of a converted layer's weight. torchao casts anew for each GEMM.

    Transformer Engine casts a weight in both orders (before Blackwell), and its formats with one
    scale keep but the order that dgrad reads, unless the cast serves the next micro-batch too. The
    layers of ``override_linear_precision`` keep both, and none where dgrad is in high precision.
    With ``backward_override`` a weight is cast for the forward pass alone, in one order, and kept.
    Of weights that lie in FP8 there is none but for the GEMM that is at work. ``stored``: whether
    the layer's does; None: as those of all layers that share theirs with nothing.
    """
    recipe = spec.recipe
    stored = stores_base(spec) if stored is None else stored
    if stored:
        return 0
    if recipe.engine != "te":
        return {"emulated": 1}.get(recipe.engine, 0)
    override = getattr(recipe, "override_linear_precision", (False, False, False))
    if override[1]:
        return 0
    if getattr(recipe, "backward_override", None) is not None:
        return 1
    one_scale = recipe.scaling in ("delayed", "current")
    kept = keeps_casts(spec, stored=stored)
    return 1 if one_scale and not kept and not any(override) else 2


def copy_beside_cast(spec: JobSpec, *, transposed: bool) -> int:
    """Bytes an element of a copy of a converted layer's weight that waits for its dgrad.

    With ``backward_override: high_precision`` that reads the weight in bf16, row after row. There
    is a copy where it is stored otherwise: in fp32, or ``transposed``, as a ``Conv1D`` keeps it.
    """
    if getattr(spec.recipe, "backward_override", None) != "high_precision":
        return 0
    return 2 if transposed or spec.training.precision.weights != "bf16" else 0


def keeps_casts(spec: JobSpec, *, stored: bool) -> bool:
    """Whether casts of weights serve all micro-batches of a step, and so outlive each of them.

    ``stored``: of weights that lie in FP8, which have none.
    """
    recipe, training = spec.recipe, spec.training
    if recipe.engine != "te" or stored or any(getattr(recipe, "override_linear_precision", ())):
        return False
    every_update = getattr(recipe, "interval", 1) == 1
    several = training.gradient_accumulation > 1
    return several and every_update and not training.gradient_checkpointing
