"""The precision recipe: which engine runs the GEMMs, and how it scales.

Field names are Transformer Engine's own where it has one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8core.spec.parts import Count, Part, one_message

LONGEST_AMAX_HISTORY = 1_000_000

Format = Literal["HYBRID", "E4M3"]
PrecisionOverride = Annotated[
    tuple[bool, bool, bool], one_message("must be three booleans: [fprop, dgrad, wgrad]")
]

_TE = "NVIDIA Transformer Engine. Needs an FP8-capable GPU."
_FORMAT = (
    "`HYBRID`: E4M3 for activations and weights, E5M2 for gradients. `E4M3`: E4M3 for all three."
)
_OVERRIDE = "Run these GEMMs in high precision instead of FP8: [fprop, dgrad, wgrad]."
_EVAL = "Evaluate in FP8 too. Off: evaluation runs in high precision."
_DPA = "Compute attention in FP8 too, in fused blocks; rows with several documents keep to bf16. "
_POWER_OF_2 = "Round each scale down to a power of two, so that scaling itself rounds nothing."


class _Scaled(Part):
    engine: str = Field(description="What runs the GEMMs.")
    scaling: str = Field(description="How tensors are scaled into the range of the format.")


class _Delayed(_Scaled):
    """Delayed scaling: scales come from a history of amaxes (largest absolute values)."""

    scaling: Literal["delayed"] = Field(
        default="delayed", description="Scales come from the amaxes of earlier steps."
    )
    margin: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="Head-room in powers of two: scale = FP8_MAX / amax / 2**margin.",
    )
    interval: Count = Field(
        default=1,
        description="Updates between two computations of the scales; the history advances at each.",
    )
    fp8_format: Format = Field(default="HYBRID", description=_FORMAT)
    amax_history_len: Annotated[int, Field(ge=1, le=LONGEST_AMAX_HISTORY)] = Field(
        default=1024, description="Number of past amaxes kept per tensor."
    )
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        default="max",
        description="Amax taken from the history: its `max`, or the `most_recent` one.",
    )
    override_linear_precision: PrecisionOverride = Field(
        default=(False, False, False), description=_OVERRIDE
    )
    use_autocast_during_eval: bool = Field(default=False, description=_EVAL)


class _Current(_Scaled):
    """Current scaling: each tensor is scaled by its own amax."""

    scaling: Literal["current"] = Field(description="Each tensor is scaled by its own amax.")
    fp8_format: Format = Field(default="HYBRID", description=_FORMAT)
    use_power_2_scales: bool = Field(default=False, description=_POWER_OF_2)
    override_linear_precision: PrecisionOverride = Field(
        default=(False, False, False), description=_OVERRIDE
    )
    use_autocast_during_eval: bool = Field(default=False, description=_EVAL)


class TEDelayed(_Delayed, title="Transformer Engine, delayed scaling"):
    """Transformer Engine, delayed scaling. Compute capability 8.9 or later."""

    engine: Literal["te"] = Field(default="te", description=_TE)
    fp8_dpa: bool = Field(default=False, description=_DPA + "Compute capability 9.0 to 11.x.")


class TECurrent(_Current, title="Transformer Engine, current scaling"):
    """Transformer Engine, current scaling. Compute capability 8.9 or later."""

    engine: Literal["te"] = Field(default="te", description=_TE)
    fp8_dpa: bool = Field(default=False, description=_DPA + "Compute capability 10.0 to 11.x.")


BackwardOverride = Literal["high_precision", "dequantized"] | None
_BACKWARD = (
    "Precision of the backward GEMMs: null (FP8), `high_precision` (the original operands) or "
    "`dequantized` (the saved FP8 operands, dequantized)."
)


class TEBlock(_Scaled, title="Transformer Engine, block scaling"):
    """Transformer Engine, one scale a block of 128 values. Compute capability 9.0, CUDA 12.9."""

    engine: Literal["te"] = Field(default="te", description=_TE)
    scaling: Literal["block"] = Field(
        description="One scale for each 1x128 strip or 128x128 block of a tensor."
    )
    fp8_format: Format = Field(default="E4M3", description=_FORMAT)
    use_f32_scales: bool = Field(default=False, description="FP32 scales instead of powers of two.")
    x_block_scaling_dim: Literal[1, 2] = Field(
        default=1, description="Blocks of activations: 1 (1x128) or 2 (128x128)."
    )
    w_block_scaling_dim: Literal[1, 2] = Field(
        default=2, description="Blocks of weights: 1 (1x128) or 2 (128x128)."
    )
    grad_block_scaling_dim: Literal[1, 2] = Field(
        default=1, description="Blocks of output gradients: 1 (1x128) or 2 (128x128)."
    )
    backward_override: BackwardOverride = Field(default=None, description=_BACKWARD)
    use_autocast_during_eval: bool = Field(default=False, description=_EVAL)


class TEMXFP8(_Scaled, title="Transformer Engine, MXFP8"):
    """Transformer Engine, MXFP8: one E8M0 scale for 32 values. Compute capability 10.0."""

    engine: Literal["te"] = Field(default="te", description=_TE)
    scaling: Literal["mxfp8"] = Field(description="One power-of-two scale for each 32 values.")
    fp8_format: Format = Field(default="E4M3", description=_FORMAT)
    enable_2d_quantization: bool = Field(
        default=False, description="Scale weights in 32x32 blocks instead of strips of 32."
    )
    fp8_dpa: bool = Field(default=False, description=_DPA + "Compute capability 10.0 to 11.x.")
    backward_override: BackwardOverride = Field(default=None, description=_BACKWARD)
    use_autocast_during_eval: bool = Field(default=False, description=_EVAL)


class TENVFP4(_Scaled, title="Transformer Engine, NVFP4"):
    """Transformer Engine, NVFP4: 4-bit values, an E4M3 scale for 16. Compute capability 10.0."""

    engine: Literal["te"] = Field(default="te", description=_TE)
    scaling: Literal["nvfp4"] = Field(description="4-bit values with one FP8 scale for each 16.")
    disable_rht: bool = Field(
        default=False, description="Switch off the random Hadamard transform of the wgrad operands."
    )
    disable_stochastic_rounding: bool = Field(
        default=False, description="Round gradients to nearest instead of stochastically."
    )
    disable_2d_quantization: bool = Field(
        default=False, description="Scale weights in strips of 16 instead of 16x16 blocks."
    )
    backward_override: BackwardOverride = Field(default=None, description=_BACKWARD)
    use_autocast_during_eval: bool = Field(default=False, description=_EVAL)


class TorchaoRecipe(_Scaled, title="torchao"):
    """torchao float8: scales computed from the tensor at hand (dynamic scaling)."""

    engine: Literal["torchao"] = Field(description="torchao's float8 training.")
    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        default="tensorwise",
        description=(
            "`tensorwise`: one scale a tensor, fastest. `rowwise`: one a row, E4M3 throughout. "
            "`rowwise_with_gw_hp`: rowwise with the wgrad GEMM in high precision, most accurate."
        ),
    )


class EmulatedDelayed(_Delayed, title="Emulated, delayed scaling"):
    """Delayed scaling with exact FP8 arithmetic in PyTorch, on any device."""

    engine: Literal["emulated"] = Field(description="Exact FP8 arithmetic in PyTorch, any device.")


class EmulatedCurrent(_Current, title="Emulated, current scaling"):
    """Current scaling with exact FP8 arithmetic in PyTorch, on any device."""

    engine: Literal["emulated"] = Field(description="Exact FP8 arithmetic in PyTorch, any device.")


class AmpRecipe(Part, title="Without FP8"):
    """The baselines without FP8: nothing is converted."""

    engine: Literal["amp"] = Field(description="PyTorch alone: no FP8, no converted layer.")
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16",
        description="`bf16` or `fp16` autocast, or plain `fp32`. `fp16` scales the loss.",
    )
    initial_loss_scale: Annotated[float, Field(gt=0, le=2.0**32)] = Field(
        default=65536.0, description="First loss scale, for `fp16`."
    )
    growth_interval: Count = Field(
        default=2000,
        description="Steps without overflow after which the loss scale doubles, for `fp16`.",
    )


TERecipe = Annotated[
    TEDelayed | TECurrent | TEBlock | TEMXFP8 | TENVFP4, Field(discriminator="scaling")
]
EmulatedRecipe = Annotated[EmulatedDelayed | EmulatedCurrent, Field(discriminator="scaling")]
Recipe = Annotated[
    TERecipe | TorchaoRecipe | EmulatedRecipe | AmpRecipe, Field(discriminator="engine")
]

TOKEN_MULTIPLE = 16
"""Of which the tokens of a micro-batch are a multiple, as FP8 kernels need it in the wgrad GEMM;
without FP8 too, so that all recipes see the same batches."""


def token_multiple(recipe: Recipe) -> int:
    """`TOKEN_MULTIPLE`, or twice that: MXFP8 and the Hadamard transform of NVFP4 take 32 values."""
    in_blocks = getattr(recipe, "scaling", None) in ("mxfp8", "nvfp4")
    return 2 * TOKEN_MULTIPLE if in_blocks else TOKEN_MULTIPLE


def high_precision_gemms(recipe: Recipe) -> tuple[bool, bool, bool]:
    """Which of fprop, dgrad and wgrad of converted layers ``recipe`` takes out of FP8."""
    if getattr(recipe, "backward_override", None) is not None:
        return (False, True, True)
    return getattr(recipe, "override_linear_precision", (False, False, False))
