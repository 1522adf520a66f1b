"""A te recipe of a spec in Transformer Engine's own classes."""

from __future__ import annotations

from typing import Any

__all__ = ["feature_multiple", "native_recipe"]


def feature_multiple(recipe: Any) -> int:
    """Of what both dimensions of a layer must be multiples: MXFP8 scales 32 values at a time, each
    way round, and the other scalings leave it to cuBLAS."""
    return 32 if recipe.scaling == "mxfp8" else 16


def native_recipe(recipe: Any) -> Any:
    """The recipe in Transformer Engine's own classes; only fields that it honours are passed.

    What its classes take from the environment when they are imported is written out.
    """
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
            backward_override=None,
            fp8_dpa=recipe.fp8_dpa,
        )
    if recipe.scaling == "current":
        current = te_recipes.Float8CurrentScaling(
            fp8_format=te_format[recipe.fp8_format],
            use_power_2_scales=recipe.use_power_2_scales,
            backward_override=None,
            fp8_dpa=recipe.fp8_dpa,
        )
        return _with_scales(current, te_recipes, power_of_two=recipe.use_power_2_scales)
    fields = recipe.model_dump(exclude={"engine", "scaling", "use_autocast_during_eval"})
    if "fp8_format" in fields:
        fields["fp8_format"] = te_format[fields["fp8_format"]]
    if recipe.scaling == "nvfp4":
        fields |= {
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
            "nvfp4_4over6_e4m3_use_256": "all",
            "nvfp4_4over6_err_mode": "MAE",
        }
    classes = {
        "block": te_recipes.Float8BlockScaling,
        "mxfp8": te_recipes.MXFP8BlockScaling,
        "nvfp4": te_recipes.NVFP4BlockScaling,
    }
    native = classes[recipe.scaling](**fields)
    if recipe.scaling == "block":
        return _with_scales(native, te_recipes, power_of_two=not recipe.use_f32_scales)
    return native


def _with_scales(native: Any, te_recipes: Any, *, power_of_two: bool) -> Any:
    """``native``, made to round its scales as asked.

    Its modules read that from three attributes of the class alone, made at import from an
    environment variable: the field of the same meaning never reaches them.
    """
    params = te_recipes.QParams(power_2_scale=power_of_two, amax_epsilon=0.0)
    for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
        setattr(native, f"fp8_quant_{tensor}", params)
    return native
