"""How a job trains: steps, batches, optimizer, schedule, precision of what is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from fp8core.spec.parts import Count, CountOrZero, Part, Ratio, Seed, one_message

StoredFormat = Literal["fp32", "bf16"]
StateFormat = Literal["fp32", "bf16", "8bit"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamW(Part, title="AdamW"):
    """AdamW with decoupled weight decay, not applied to norms and biases."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    lr: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        default=3e-4, description="Peak learning rate."
    )
    betas: Annotated[
        tuple[Beta, Beta], one_message("must be two numbers, each at least 0 and below 1")
    ] = Field(default=(0.9, 0.999), description="Decay rates of the two moments.")
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1e-8, description="Added to the denominator of the update."
    )
    weight_decay: Annotated[float, Field(ge=0.0, le=1000.0)] = Field(
        default=0.01, description="Decoupled weight decay; norms and biases are exempt."
    )


class _Schedule(Part):
    name: str = Field(description="Shape of the learning rate over the steps.")
    warmup_steps: CountOrZero = Field(
        default=0, description="Steps over which the learning rate rises from 0 to its peak."
    )


class ConstantSchedule(_Schedule, title="Constant"):
    """Warm-up, then the peak learning rate."""

    name: Literal["constant"] = Field(description="The peak learning rate to the end.")


class LinearSchedule(_Schedule, title="Linear"):
    """Warm-up, then a straight line down to the last step."""

    name: Literal["linear"] = Field(description="A straight line from the peak to the end.")
    final_lr_ratio: Ratio = Field(
        default=0.0, description="Learning rate at the last step, as a share of the peak."
    )


class CosineSchedule(_Schedule, title="Cosine"):
    """Warm-up, then half a cosine down to the last step."""

    name: Literal["cosine"] = Field(
        default="cosine", description="Half a cosine from the peak to the end."
    )
    final_lr_ratio: Ratio = Field(
        default=0.1, description="Learning rate at the last step, as a share of the peak."
    )


class WarmupStableDecaySchedule(_Schedule, title="Warm-up, stable, decay"):
    """Warm-up, a plateau at the peak, then a straight line down over the last steps."""

    name: Literal["warmup_stable_decay"] = Field(
        description="A plateau at the peak, then a straight line down."
    )
    decay_steps: Count = Field(description="Steps of the decay at the end.")
    final_lr_ratio: Ratio = Field(
        default=0.0, description="Learning rate at the last step, as a share of the peak."
    )


Schedule = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WarmupStableDecaySchedule,
    Field(discriminator="name"),
]


def _by_preset(validated: dict[str, Any]) -> StoredFormat:
    return "fp32" if validated.get("preset", "method") == "method" else "bf16"


def _states_by_preset(validated: dict[str, Any]) -> StateFormat:
    return "8bit" if validated.get("preset") == "memory" else _by_preset(validated)


class Precision(Part):
    """Formats of what training stores and sends. GEMM formats are the recipe's."""

    preset: Literal["method", "throughput", "memory"] = Field(
        default="method",
        description=(
            "Defaults of the fields below. `method`: all fp32. `throughput`: weights, gradients "
            "and optimizer states in bf16. `memory`: the same with states in 8 bits."
        ),
    )
    weights: StoredFormat = Field(
        default_factory=_by_preset,
        description="Format of the model's weights.",
        json_schema_extra={"default": "fp32"},
    )
    master_weights: Literal["fp32", "none"] = Field(
        default="none",
        description="`fp32`: the optimizer keeps a separate fp32 copy of bf16 weights.",
    )
    gradients: StoredFormat = Field(
        default_factory=_by_preset,
        description="Format in which gradients are accumulated.",
        json_schema_extra={"default": "fp32"},
    )
    optimizer_states: StateFormat = Field(
        default_factory=_states_by_preset,
        description=(
            "Format of the optimizer's moments. `8bit`: floats of 8 bits that share an exponent "
            "in blocks of 256; those of norms and biases stay fp32."
        ),
        json_schema_extra={"default": "fp32"},
    )
    communication: StoredFormat = Field(
        default="fp32", description="Format in which gradients travel between ranks."
    )

    @classmethod
    def throughput(cls) -> Self:
        """What the shorthand string "throughput" stands for."""
        return cls(preset="throughput")


class EarlyStopping(Part, title="Early stopping"):
    """Stop when the evaluation loss no longer falls."""

    patience: Count = Field(description="Evaluations without improvement before training stops.")
    min_delta: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Smallest fall of the evaluation loss that counts."
    )


class OnDivergence(Part, title="On divergence"):
    """What happens when the loss or the gradients of a step are not finite numbers."""

    action: Literal["fail", "skip_step", "fallback_bf16"] = Field(
        default="fail",
        description=(
            "`fail`: the job ends with the reason `diverged`. `skip_step`: the step changes "
            "nothing, and training goes on with the next batch. `fallback_bf16`: the layers at "
            "fault, then all converted ones, go back to high precision, and the step is repeated."
        ),
    )
    max_consecutive: Count = Field(
        default=10, description="Skipped steps in a row after which the job fails (`skip_step`)."
    )


class Parity(Part):
    """A reference in high precision, trained before the job itself, to compare losses with."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = Field(
        description="Steps of the reference; at most those of the job."
    )
    dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Format in which the reference computes (engine `amp`)."
    )
    bound: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.02, description="Largest relative gap between the smoothed losses."
    )


class Training(Part):
    """How the model is trained."""

    steps: Count = Field(default=1000, description="Optimizer steps.")
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=8, description="Sequences per micro-batch on each rank."
    )
    sequence_length: Annotated[int, Field(ge=2, le=4_194_304)] = Field(
        default=512, description="Tokens per sequence."
    )
    gradient_accumulation: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="Micro-batches per optimizer step."
    )
    seed: Seed = Field(default=0, description="Seed of weights, dropout and masking.")
    optimizer: AdamW = Field(default_factory=AdamW, description="The optimizer.")
    schedule: Schedule = Field(
        default_factory=CosineSchedule, description="The learning rate over the steps."
    )
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        default=1.0, description="Norm to which gradients are clipped; null: not clipped."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in backward instead of keeping them."
    )
    recomputed_blocks: Count | None = Field(
        default=None,
        description=(
            "With gradient_checkpointing: so many blocks, from the first on, are recomputed; null: "
            "all of them."
        ),
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        default="auto",
        description=(
            "`auto`: where the GPU waits for the host, forward and backward of a step are replayed "
            "as one CUDA graph. `off`: never."
        ),
    )
    mask_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.15, description="Share of tokens to predict, for the task `masked_lm`."
    )
    precision: Precision = Field(
        default_factory=Precision,
        description=(
            'Formats of what is stored and sent; the strings "throughput" and "memory" are '
            "shorthands."
        ),
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="Stop when the evaluation loss no longer falls; null: never."
    )
    on_divergence: OnDivergence = Field(
        default_factory=OnDivergence,
        description="What happens at a loss that is not finite; the action alone is a shorthand.",
    )
    parity: Parity | None = Field(
        default=None, description="Compare with a reference in high precision; null: do not."
    )
