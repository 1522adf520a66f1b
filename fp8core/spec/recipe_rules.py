"""What a recipe and the fields that depend on its engine must say together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8core.spec.problems import Problem
from fp8core.spec.recipe import AmpRecipe, high_precision_gemms
from fp8core.spec.rule_table import changed, conflict, reads

if TYPE_CHECKING:
    from fp8core.spec.job import JobSpec


@reads("/recipe/engine", "/resources/device")
def _engine_fits_device(spec: JobSpec) -> Iterator[Problem]:
    if spec.recipe.engine == "te" and spec.resources.device == "cpu":
        yield conflict(
            "/resources/device",
            "Transformer Engine needs a GPU; choose device auto or cuda, or the engine emulated",
        )


@reads("/recipe", "/conversion/fuse")
def _fp8_attention_is_fused(spec: JobSpec) -> Iterator[Problem]:
    if not getattr(spec.recipe, "fp8_dpa", False):
        return
    needed = "attention computes in FP8 in fused blocks alone, so this would have no effect with "
    if spec.conversion.fuse == "none":
        yield conflict("/recipe/fp8_dpa", f'{needed}conversion.fuse "none"')
    if any(getattr(spec.recipe, "override_linear_precision", ())):
        yield conflict(
            "/recipe/fp8_dpa",
            "attention in FP8 beside override_linear_precision has not been tried; leave one out",
        )
    if getattr(spec.recipe, "backward_override", None) is not None:
        yield conflict(
            "/recipe/fp8_dpa",
            "attention in FP8 beside backward_override has not been tried; leave one out",
        )
    if spec.task != "causal_lm":
        yield conflict("/recipe/fp8_dpa", f"{needed}the task {spec.task}; only causal_lm has any")


@reads("/recipe")
def _one_operand_of_each_product_has_strips(spec: JobSpec) -> Iterator[Problem]:
    fields = [f"{tensor}_block_scaling_dim" for tensor in ("x", "grad", "w")]
    tiled = [field for field in fields if getattr(spec.recipe, field, 1) == 2]
    if len(tiled) > 1:
        yield conflict(
            f"/recipe/{tiled[0]}",
            f"two tensors with 128x128 blocks cannot be multiplied: of {' and '.join(tiled)} only "
            "one may be 2",
        )


@reads("/recipe", "/adapter", "/conversion/linear")
def _base_weights_are_read_in_fp8(spec: JobSpec) -> Iterator[Problem]:
    if spec.adapter is None or spec.adapter.base_weights is None:
        return
    recipe, pointer = spec.recipe, "/adapter/base_weights"
    if isinstance(recipe, AmpRecipe):
        yield conflict(
            pointer, "amp multiplies no weight in FP8, and would read a rounded base; leave it out"
        )
    elif recipe.engine == "torchao":
        yield conflict(
            pointer,
            "torchao casts each weight itself, from bf16 or fp32; choose the engine te or emulated",
        )
    elif recipe.scaling not in ("delayed", "current"):
        yield conflict(
            pointer,
            f"the scaling {recipe.scaling} gives each block of a weight a scale of its own, and "
            "frozen weights are kept with one; choose delayed or current",
        )
    elif any(high_precision_gemms(recipe)):
        yield conflict(
            pointer,
            "a GEMM that override_linear_precision keeps in high precision would read rounded "
            "weights; leave one of the two out",
        )
    if not spec.conversion.linear:
        yield conflict(pointer, "would have no effect: conversion.linear is false")


@reads("/recipe/dtype", "/recipe/initial_loss_scale", "/recipe/growth_interval", "/recipe/engine")
def _loss_scale_is_used(spec: JobSpec) -> Iterator[Problem]:
    if isinstance(spec.recipe, AmpRecipe) and spec.recipe.dtype != "fp16":
        message = f"would have no effect with dtype {spec.recipe.dtype}; only fp16 scales the loss"
        for field in changed(spec.recipe):
            if field in ("initial_loss_scale", "growth_interval"):
                yield conflict(f"/recipe/{field}", message)


@reads("/recipe/engine", "/recipe/dtype", "/training/precision")
def _amp_fits_precision(spec: JobSpec) -> Iterator[Problem]:
    if not isinstance(spec.recipe, AmpRecipe):
        return
    precision = spec.training.precision
    if spec.recipe.dtype == "fp32" and precision.weights != "fp32":
        yield conflict(
            "/training/precision/weights",
            "amp in fp32 computes in the format of the weights, which must then be fp32",
        )
    if spec.recipe.dtype == "fp16":
        for field in ("weights", "gradients"):
            if getattr(precision, field) != "fp32":
                yield conflict(
                    f"/training/precision/{field}",
                    f"fp16 scales the loss and needs {field} in fp32",
                )


@reads("/training/on_divergence", "/recipe/engine")
def _divergence_action_has_an_effect(spec: JobSpec) -> Iterator[Problem]:
    wanted = spec.training.on_divergence
    if wanted.action != "skip_step" and "max_consecutive" in changed(wanted):
        yield conflict(
            "/training/on_divergence/max_consecutive",
            f"would have no effect with the action {wanted.action}; only skip_step skips steps",
        )
    if wanted.action == "fallback_bf16" and isinstance(spec.recipe, AmpRecipe):
        yield conflict(
            "/training/on_divergence/action",
            "amp converts no layer, so there is none to put back into high precision",
        )


@reads("/training/parity", "/training/steps", "/training/precision/weights", "/recipe")
def _parity_compares(spec: JobSpec) -> Iterator[Problem]:
    parity, steps = spec.training.parity, spec.training.steps
    if parity is None:
        return
    if parity.steps > steps:
        yield conflict(
            "/training/parity/steps",
            f"{parity.steps} steps are more than the job's {steps} (/training/steps)",
        )
    if isinstance(spec.recipe, AmpRecipe) and spec.recipe.dtype == parity.dtype:
        yield conflict(
            "/training/parity/dtype",
            f"the job itself is amp in {parity.dtype}, so it would be compared with itself",
        )
    if parity.dtype == "fp32" and spec.training.precision.weights != "fp32":
        yield conflict(
            "/training/parity/dtype",
            "amp in fp32 computes in the format of the weights, which must then be fp32 "
            "(/training/precision/weights)",
        )
