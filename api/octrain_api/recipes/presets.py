"""Recipes that come with the service: what each is for, and why its fields are as they are."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A part of a spec under a name; `needs` says in words what a node must have."""

    name: str
    title: str
    reasons: tuple[str, ...]
    needs: str
    fragment: dict[str, Any]


_DELAYED = {
    "engine": "te",
    "scaling": "delayed",
    "fp8_format": "HYBRID",
    "amax_history_len": 16,
    "amax_compute_algo": "max",
}
_HOPPER = "Transformer Engine on a GPU of compute capability 8.9 or later"

PRESETS: tuple[Preset, ...] = (
    Preset(
        "te-delayed",
        "The method itself: delayed scaling, everything beside the GEMMs in fp32",
        (
            "Scales come from the largest amax of the last 16 updates: a scale is known before its "
            "tensor is, so that casts cost one pass.",
            "HYBRID gives gradients E5M2's range, and activations and weights E4M3's precision.",
            "Weights, gradients and optimizer states stay fp32: what differs from a baseline in "
            "bf16 is the GEMMs alone.",
        ),
        _HOPPER,
        {
            "recipe": {**_DELAYED},
            "training": {"precision": "method"},
        },
    ),
    Preset(
        "te-current",
        "Current scaling: no history to be wrong",
        (
            "Each tensor is scaled by its own amax: an outlier saturates nothing, at the cost of "
            "one more pass over each tensor.",
            "The choice when `fp8/.../saturated` of a delayed run shows spikes.",
        ),
        _HOPPER,
        {"recipe": {"engine": "te", "scaling": "current", "fp8_format": "HYBRID"}},
    ),
    Preset(
        "te-block",
        "One scale for 128 values: an outlier costs its own block only",
        (
            "The finest scaling that Hopper has; E4M3 suffices for gradients too.",
            "Layers whose dimensions are not multiples of 128 lose part of the gain.",
        ),
        "Transformer Engine on a GPU of compute capability 9.0 or later, CUDA 12.9",
        {"recipe": {"engine": "te", "scaling": "block"}},
    ),
    Preset(
        "te-throughput",
        "Delayed scaling with weights, gradients and optimizer states in bf16",
        (
            "Half of the memory and of the optimizer's traffic, for speed.",
            "Small updates can be lost in bf16 weights: compare the loss with `te-delayed` first.",
        ),
        _HOPPER,
        {
            "recipe": {**_DELAYED},
            "training": {"precision": "throughput"},
        },
    ),
    Preset(
        "te-memory",
        "Memory first: delayed scaling, optimizer states in 8 bits, activations recomputed",
        (
            "The optimizer's two moments take two bytes a parameter instead of four in bf16 and "
            "eight in fp32.",
            "A block keeps its input alone and is computed again, in FP8, in the backward pass: "
            "about a third more work for most of the activations' memory.",
            "Small updates can be lost in bf16 weights: where memory allows, add "
            '`"master_weights": "fp32"` to `training.precision`, or store the weights in fp32.',
        ),
        _HOPPER,
        {
            "recipe": {**_DELAYED},
            "training": {"precision": "memory", "gradient_checkpointing": True},
        },
    ),
    Preset(
        "te-cautious",
        "Delayed scaling, with the first and last layer and every weight gradient in bf16",
        (
            "The first and the last Linear are where FP8 is most often seen to hurt.",
            "Weight gradients in high precision cost about a third of the gain "
            "(`docs/recipes.md` has the measured times of each tuple).",
        ),
        _HOPPER,
        {
            "recipe": {
                "engine": "te",
                "scaling": "delayed",
                "fp8_format": "HYBRID",
                "amax_history_len": 1024,
                "amax_compute_algo": "max",
                "override_linear_precision": [False, False, True],
            },
            "conversion": {"keep_first_last": True},
        },
    ),
    Preset(
        "torchao-tensorwise",
        "FP8 without Transformer Engine",
        (
            "Compiled by PyTorch alone; one scale a tensor, made from the tensor itself.",
            "Evaluation always runs in high precision.",
        ),
        "torchao; a GPU of compute capability 8.9 or later, or a CPU (emulated)",
        {"recipe": {"engine": "torchao", "scaling": "tensorwise"}},
    ),
    Preset(
        "torchao-rowwise",
        "FP8 without Transformer Engine, one scale a row",
        ("More accurate than tensorwise, slower: each row is scaled by its own amax.",),
        "torchao; a GPU of compute capability 9.0 or later, or a CPU (emulated)",
        {"recipe": {"engine": "torchao", "scaling": "rowwise"}},
    ),
    Preset(
        "emulated-delayed",
        "Transformer Engine's arithmetic on any machine",
        (
            "Shows what delayed scaling does to a loss where there is no GPU: the same amaxes, "
            "histories and scales as `te-delayed`.",
            "Not faster than fp32: it is for numerics, not for speed.",
        ),
        "any node",
        {
            "recipe": {
                "engine": "emulated",
                "scaling": "delayed",
                "fp8_format": "HYBRID",
                "amax_history_len": 16,
                "amax_compute_algo": "max",
            }
        },
    ),
    Preset(
        "baseline-bf16",
        "The baseline: bf16 autocast, no FP8",
        ("What every FP8 run is to be compared with: same data, same seed, same masters.",),
        "any node",
        {"recipe": {"engine": "amp", "dtype": "bf16"}},
    ),
    Preset(
        "baseline-fp32",
        "The reference: fp32 throughout",
        ("Tells whether a gap comes from FP8 or from bf16.",),
        "any node",
        {"recipe": {"engine": "amp", "dtype": "fp32"}},
    ),
)

BY_NAME = {preset.name: preset for preset in PRESETS}
