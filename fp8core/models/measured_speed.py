"""What was measured of models of about this size: FP8 beside bf16, for a plan to quote."""

from __future__ import annotations

from typing import Any

from fp8core.measured import ModelSpeeds, cards, nearest_model
from fp8core.spec import JobSpec
from fp8core.spec.recipe import TERecipe, high_precision_gemms

__all__ = ["measured_speeds"]

_MEASURED_SCALING = "delayed"
"""That of all rows in FP8 of `benchmarks/train_peers.py`."""
_WORDS = {
    "fused_head": "blocks fused and the head in FP8",
    "fused": "blocks fused",
    "fused_fp8_attention": "blocks fused, the head and attention in FP8",
    "plain": "layer by layer",
}


def measured_speeds(
    spec: JobSpec, parameters: int, card: str | None, *, fused: bool, not_graphed: str | None
) -> list[dict[str, Any]]:
    """For each card with figures (for ``card`` alone, where it has some): the measured size that
    is nearest, and how fast it trained in FP8, computed as ``spec`` would be, over bf16 (layer by
    layer too, where nothing of the model is fused). ``fused``: whether its blocks are fused in FP8;
    ``not_graphed``: why its steps are not replayed as CUDA graphs, or None where they may be.

    Keys: ``card``, ``size``, ``parameters``, ``tokens`` (of a step), ``precision`` (of the
    weights), ``date``, ``row``, ``speed_up``, ``tokens_per_second`` by row, and ``says``: the same
    in words. Empty for engines that were not measured, and where the base of adapters is frozen.
    """
    if spec.recipe.engine != "te" or spec.adapter is not None:
        return []
    known = cards("models")
    found = []
    for name in [card] if card is not None and card in known else known:
        speeds = nearest_model(name, parameters)
        row = None if speeds is None else _row(speeds, spec, fused)
        if speeds is not None and row is not None:
            found.append(_quoted(speeds, row, not_graphed, spec.recipe))
    return found


def _row(speeds: ModelSpeeds, spec: JobSpec, fused: bool) -> str | None:
    """The measured way that is most like what ``spec`` would do; None where there is none."""
    if not fused:
        likes = ["plain"]
    elif getattr(spec.recipe, "fp8_dpa", False) and spec.conversion.output_head:
        likes = ["fused_fp8_attention", "fused_head", "fused"]
    elif spec.conversion.output_head:
        likes = ["fused_head", "fused"]
    else:
        likes = ["fused", "fused_head"]
    return next((row for row in likes if row in speeds.tokens_per_second), None)


def _quoted(
    speeds: ModelSpeeds, row: str, not_graphed: str | None, recipe: TERecipe
) -> dict[str, Any]:
    otherwise = ""
    if recipe.scaling != _MEASURED_SCALING:
        otherwise = (
            f"; measured with {_MEASURED_SCALING} scaling, while this job's is {recipe.scaling}"
        )
    if any(high_precision_gemms(recipe)):
        fields = ("override_linear_precision", "backward_override")
        field = next(name for name in fields if hasattr(recipe, name))
        otherwise += f"; measured with all their GEMMs in FP8, while this job has {field}"
    if row in speeds.graphed and not_graphed is not None:
        otherwise += (
            "; its steps were replayed as CUDA graphs, and FP8 gains less, if anything, where they "
            f"are not, as here: {not_graphed}"
        )
    beside, bf16_fused = speeds.bf16_beside(row)
    speed_up = speeds.tokens_per_second[row] / beside
    if row == "plain":
        bf16 = "blocks fused" if bf16_fused else "layer by layer too"
    else:
        bf16 = "blocks fused too" if bf16_fused else "its blocks not fused"
    return {
        "card": speeds.card,
        "size": speeds.size,
        "parameters": speeds.parameters,
        "tokens": speeds.tokens,
        "precision": speeds.precision,
        "date": speeds.date,
        "row": row,
        "speed_up": round(speed_up, 3),
        "tokens_per_second": dict(speeds.tokens_per_second),
        "says": (
            f"measured on {speeds.card}: a model of {speeds.parameters / 1e9:.2g} billion "
            f"parameters trained {speed_up:.2f} times as fast in FP8 ({_WORDS[row]}) as in bf16 "
            f"({bf16}), {speeds.tokens:,} tokens a step, {speeds.precision} weights{otherwise}"
        ),
    }
