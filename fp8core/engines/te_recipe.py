"""A te recipe of a spec in Transformer Engine's own classes."""

from __future__ import annotations

from typing import Any

__all__ = ["native_recipe"]


def native_recipe(recipe: Any) -> Any:
    """The recipe in Transformer Engine's own classes; only fields that it honours are passed."""
    from transformer_engine.common import recipe as te_recipes

    te_format = {
        "HYBRID": te_recipes.Format.HYBRID,
        "E4M3": te_recipes.Format.E4M3,
    }
    if recipe.scaling == "delayed":
        return te_recipes.DelayedScaling(
            margin=recipe.margin,
            fp8_format=te_format[recipe.fp8_format],
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
        )
    if recipe.scaling == "current":
        return te_recipes.Float8CurrentScaling(
            fp8_format=te_format[recipe.fp8_format],
            use_power_2_scales=recipe.use_power_2_scales,
        )
    fields = recipe.model_dump(exclude={"engine", "scaling", "use_autocast_during_eval"})
    if "fp8_format" in fields:
        fields["fp8_format"] = te_format[fields["fp8_format"]]
    classes = {
        "block": te_recipes.Float8BlockScaling,
        "mxfp8": te_recipes.MXFP8BlockScaling,
        "nvfp4": te_recipes.NVFP4BlockScaling,
    }
    return classes[recipe.scaling](**fields)
