"""What to say about a key that does not belong where it stands."""

from __future__ import annotations

from difflib import get_close_matches

from fp8core.spec.annotations import parts_of, places_of_fields, tags_of
from fp8core.spec.document import quoted
from fp8core.spec.job import JobSpec
from fp8core.spec.parts import Part
from fp8core.spec.problems import Problem, pointer_of
from fp8core.spec.recipe import EmulatedDelayed, TorchaoRecipe

_DELAYED_ONLY = {"margin", "interval", "amax_history_len", "amax_compute_algo"}
_TORCHAO_REASONS = {
    "fp8_format": (
        "torchao's scaling fixes the formats: tensorwise is E4M3 with E5M2 gradients, the rowwise "
        "ones are E4M3 throughout"
    ),
    "override_linear_precision": (
        "torchao has no such setting; scaling rowwise_with_gw_hp runs the wgrad GEMM in high "
        "precision"
    ),
    "use_autocast_during_eval": "torchao has no such switch",
    "enable_fsdp_float8_all_gather": (
        "the FP8 all-gather needs weights sharded by FSDP2, which is not used here; set it to "
        "false or leave it out"
    ),
    "config": "write torchao's settings as fields of the recipe",
    "module_filter_func": "a function cannot be submitted; conversion.skip and conversion.only "
    "choose the layers",
    "pad_inner_dim": (
        "would have no effect: torchao pads only the summed dimension of a product, and layers and "
        "batches here are multiples of 16 in each; remove it"
    ),
    "emulate": "the device decides: FP8 GEMMs are emulated where it has none",
    "round_scales_to_power_of_2": "the scaling decides: the rowwise ones round to powers of two",
}
_FP8_MHA = (
    "not offered: the products of q, k and v leave in bf16, in which they are rotated by their "
    "positions before attention; fp8_dpa computes attention in FP8"
)
# Settings of Transformer Engine's recipes for which there is no field here.
_NOT_OFFERED = {
    "reduce_amax", "scaling_factor_compute_algo", "backward_override",
    "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_quant_fwd_inp",
    "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "row_scaled_activation", "nvfp4_4over6",
    "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode", "fp4_format", "qfactory",
    "quantization_alignment",
}  # fmt: skip


def unknown_key(path: tuple[int | str, ...], holder: type[Part]) -> Problem:
    """The problem of a key that `holder` does not have."""
    pointer, key = pointer_of(path), str(path[-1])
    if path[0] == "recipe" and (reason := _recipe_reason(key, holder)):
        return Problem(pointer, reason, "unsupported")
    close = get_close_matches(key, holder.model_fields, n=1, cutoff=0.6)
    if close:
        message = f"unknown key {quoted(key)}; did you mean {quoted(close[0])}?"
        return Problem(pointer, message, "unknown_key", close[0])
    everywhere = places_of_fields()
    elsewhere = [key] if key in everywhere else get_close_matches(key, everywhere, n=1, cutoff=0.8)
    places = everywhere[elsewhere[0]] if elsewhere else ()
    if len(places) == 1:
        message = f"unknown key {quoted(key)} here; did you mean {places[0]}?"
        return Problem(pointer, message, "unknown_key", places[0])
    known = ", ".join(holder.model_fields)
    return Problem(pointer, f"unknown key {quoted(key)}; known here: {known}", "unknown_key")


def _recipe_reason(key: str, holder: type[Part]) -> str | None:
    """Why a recipe does not have a setting that other recipes, or the engine itself, do have."""
    tags = tags_of(holder)
    engine = str(tags["engine"][0])
    if key in _DELAYED_ONLY:
        if holder is TorchaoRecipe:
            return (
                f"torchao has no delayed scaling and keeps no amax history, so {quoted(key)} would "
                "have no effect; remove it, or choose the engine te or emulated"
            )
        if engine == "amp":
            return f"amp runs without FP8, so {quoted(key)} would have no effect; remove it"
        return (
            f"belongs to delayed scaling and would have no effect with {tags['scaling'][0]} "
            'scaling; remove it, or choose "scaling": "delayed"'
        )
    if holder is TorchaoRecipe and key in _TORCHAO_REASONS:
        return _TORCHAO_REASONS[key]
    if engine == "te" and key == "fp8_mha":
        return _FP8_MHA
    if engine == "te" and key == "fp8_dpa":
        scaling = tags["scaling"][0]
        return f"Transformer Engine has no FP8 attention under {scaling} scaling; remove it"
    others = _recipes_with(key)
    if others:
        return f"not a setting of {_named(holder)}; it belongs to {' and '.join(others)}"
    if engine == "te" and key in _NOT_OFFERED:
        return "a setting of Transformer Engine that is not offered here; remove it"
    if key in ("enable_fsdp_float8_all_gather", "config", "module_filter_func", "pad_inner_dim"):
        return "belongs to torchao (engine torchao)"
    return None


def _recipes_with(key: str) -> list[str]:
    recipes = parts_of(JobSpec.model_fields["recipe"].annotation)
    # The emulated recipes have Transformer Engine's fields; naming the engine once is enough.
    return [
        _named(recipe)
        for recipe in recipes
        if key in recipe.model_fields and not issubclass(recipe, EmulatedDelayed)
    ]


def _named(recipe: type[Part]) -> str:
    tags = tags_of(recipe)
    engine, scaling = tags["engine"][0], tags.get("scaling", ())
    return f"{engine} {scaling[0]} scaling" if len(scaling) == 1 else str(engine)
