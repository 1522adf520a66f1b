"""JobSpec: everything that defines a training job."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from fp8core.spec.parts import LONGEST_LIMIT, Count, CountOrZero, ModulePattern, Part, one_message
from fp8core.spec.problems import Problem
from fp8core.spec.recipe import Recipe
from fp8core.spec.rules import broken_rules
from fp8core.spec.sources import (
    BytesTokenizer,
    ConfigModel,
    DataSource,
    ModelReference,
    ModelTokenizer,
    Tokenizer,
)
from fp8core.spec.spellings import Canonical
from fp8core.spec.training import Training

LABEL_KEY_PATTERN = r"^[A-Za-z0-9._/-]+$"
WANDB_PROJECT_PATTERN = r"^[A-Za-z0-9._-]+$"

# Variables of the trainer's environment that hold a credential, by the ends of their names.
SECRET_VARIABLE_PATTERN = r"^([A-Z][A-Z0-9_]*_)?(TOKEN|KEY|KEY_ID|SECRET|PASSWORD)$"
SECRET_NAME_PATTERN = r"^[a-z0-9][a-z0-9-]*$"

SecretVariable = Annotated[str, Field(min_length=1, max_length=64, pattern=SECRET_VARIABLE_PATTERN)]
SecretName = Annotated[str, Field(min_length=1, max_length=64, pattern=SECRET_NAME_PATTERN)]
LabelKey = Annotated[str, Field(min_length=1, max_length=64, pattern=LABEL_KEY_PATTERN)]
LabelValue = Annotated[str, Field(max_length=256)]


class Conversion(Part):
    """Which layers are replaced by the recipe's engine. `amp` replaces none."""

    linear: bool = Field(default=True, description="Convert linear layers.")
    layer_norm: bool = Field(default=True, description="Convert LayerNorm layers.")
    rms_norm: bool = Field(default=True, description="Convert RMSNorm layers.")
    output_head: bool = Field(
        default=False, description="Convert the output head (`lm_head`, classifier) too."
    )
    skip: Annotated[list[ModulePattern], Field(max_length=1000)] = Field(
        default_factory=list,
        description="Glob patterns over module names; matching layers are kept.",
    )
    only: Annotated[list[ModulePattern], Field(min_length=1, max_length=1000)] | None = Field(
        default=None,
        description="Glob patterns over module names; only matching layers are converted.",
    )
    keep_first_last: bool = Field(
        default=False, description="Keep the first and the last linear layer in high precision."
    )
    fuse: Literal["auto", "none"] = Field(
        default="auto",
        description=(
            "`auto`: blocks compute through fused kernels where the engine has them (te; "
            "amp in bf16) and a block's fused form gives the same numbers; so does the loss. "
            "`none`: layer by layer."
        ),
    )
    small_gemm: Literal["auto", "off"] = Field(
        default="auto",
        description=(
            "`auto`: layers that FP8 would slow down at these sizes stay in bf16, on a GPU where "
            "that was measured (te). `off`: they are converted all the same."
        ),
    )


class LoraAdapter(Part, title="LoRA"):
    """Low-rank adapters beside frozen layers (Hu et al., arXiv:2106.09685), through `peft`."""

    type: Literal["lora"] = Field(default="lora", description="The kind of adapter.")
    rank: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=8, description="Inner dimension of each adapter."
    )
    alpha: Annotated[float, Field(gt=0.0, le=1_000_000.0)] = Field(
        default=16.0, description="An adapter's output is multiplied by alpha / rank."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Dropout on the input of the adapters."
    )
    target_modules: Annotated[
        Literal["linear"] | Annotated[list[ModulePattern], Field(min_length=1, max_length=1000)],
        one_message('must be "linear" or a list of 1 to 1000 glob patterns', tuples=False),
    ] = Field(
        default="linear",
        description=(
            "Glob patterns over the names of linear layers; `linear`: all but the output head."
        ),
    )
    base_weights: Literal["fp8"] | None = Field(
        default=None,
        description=(
            "What frozen weights of converted layers lie in: null, what `training.precision."
            "weights` says; `fp8`, E4M3 with one scale for each GEMM, cast once from the former."
        ),
    )
    export: Literal["adapter", "merged"] = Field(
        default="merged",
        description=(
            "`merged`: a plain model with the adapters added to its weights. `adapter`: a folder "
            "for `PeftModel.from_pretrained`."
        ),
    )


class Evaluation(Part):
    """Evaluation on held-out data."""

    every_steps: CountOrZero = Field(
        default=200, description="Steps between evaluations; 0: only at the end."
    )
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.02, description="Share of the data held out; 0: no evaluation."
    )
    max_batches: Count | None = Field(
        default=None, description="Most batches per evaluation; null: all held-out data."
    )


class Checkpoint(Part):
    """When checkpoints are written, and how many are kept."""

    every_steps: CountOrZero = Field(
        default=200, description="Steps between checkpoints; 0: only at the end and on a stop."
    )
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=3, description="Newest checkpoints kept."
    )
    keep_best: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=1, description="Checkpoints of lowest evaluation loss kept besides."
    )
    final: bool = Field(
        default=True,
        description=(
            "Save a checkpoint of the last step and the model; false: only figures remain."
        ),
    )


class MlflowSink(Part, title="MLflow"):
    """An MLflow tracking server. Its secrets are in the environment of the machine that trains."""

    tracking_uri: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="Address of the server; null: the machine's own `MLFLOW_TRACKING_URI`.",
    )
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default="octrain", description="Name of the experiment; made where there is none."
    )


class WandbSink(Part, title="Weights & Biases"):
    """Weights & Biases. Its key is in the environment of the machine that trains."""

    project: Annotated[str, Field(min_length=1, max_length=128, pattern=WANDB_PROJECT_PATTERN)] = (
        Field(default="octrain", description="Name of the project.")
    )
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="`offline`: files only, kept as an artifact, for `wandb sync`.",
    )


class Telemetry(Part):
    """How often training reports, and where to besides the service."""

    log_every_steps: Count = Field(default=1, description="Steps between reports of metrics.")
    fp8_every_steps: CountOrZero = Field(
        default=10, description="Steps between reports of FP8 health per layer; 0: none."
    )
    tensorboard: bool = Field(
        default=False, description="Write TensorBoard event files too, kept as an artifact."
    )
    mlflow: MlflowSink | None = Field(
        default=None, description="Send metrics to an MLflow server too; null: do not."
    )
    wandb: WandbSink | None = Field(
        default=None, description="Send metrics to Weights & Biases too; null: do not."
    )


class Resources(Part):
    """What the job runs on."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto",
        description=(
            "`auto` takes a GPU, or a CPU where there is none and the engine allows it; with "
            "several GPUs it is `cuda`."
        ),
    )
    gpus: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="GPUs of one node, with one rank on each."
    )
    cpu_ranks: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Ranks of a job on a CPU; each takes one CPU slot of the node."
    )
    rank_timeout_seconds: Annotated[int, Field(ge=5, le=86_400)] = Field(
        default=600,
        description=(
            "Seconds a rank waits for the others in an exchange before the run ends as crashed."
        ),
    )

    @property
    def ranks(self) -> int:
        """How many ranks train together."""
        return self.cpu_ranks if self.device == "cpu" else self.gpus


class Limits(Part):
    """Time limits and restarts, enforced by the service."""

    lease_ttl_seconds: Annotated[int, Field(ge=30, le=86_400)] = Field(
        default=900, description="Seconds a node may be out of contact before its run is ended."
    )
    max_restarts: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3, description="Restarts after a lost node or a failure that may pass."
    )
    restart_backoff_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=5,
        description="Seconds before the first restart; doubled at each, to 3600 at most.",
    )
    cancel_deadline_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=120,
        description="Seconds a cancelled or paused run has to stop before it is killed.",
    )
    max_run_time_seconds: Annotated[int, Field(ge=1, le=LONGEST_LIMIT)] | None = Field(
        default=None,
        description="Seconds all runs of the job may take together; it then stops and fails.",
    )
    max_queue_time_seconds: Annotated[int, Field(ge=1, le=LONGEST_LIMIT)] | None = Field(
        default=None,
        description="Seconds the job may wait in the queue each time; it then fails.",
    )
    stall_timeout_seconds: Annotated[int, Field(ge=1, le=LONGEST_LIMIT)] | None = Field(
        default=1800,
        description="Seconds without a step or a new phase after which a run counts as stalled.",
    )
    idle_gpu_timeout_seconds: Annotated[int, Field(ge=60, le=LONGEST_LIMIT)] | None = Field(
        default=None,
        description=(
            "Seconds during which all GPUs of a run show a utilisation below 1 %, after which the "
            "job is stopped and fails; only where the node can read it."
        ),
    )
    on_stall: Literal["report", "restart", "fail"] = Field(
        default="report",
        description="What a stall leads to: an event, and with it a restart or the job's failure.",
    )


# The validation context of parse_spec, which translates spellings and applies rules by itself.
UNCHECKED: Any = {"fp8core.spec": "unchecked"}


def _refuse(problems: list[Problem]) -> None:
    if problems:
        message = "; ".join(str(problem) for problem in problems)
        raise PydanticCustomError("spec_invalid", "{message}", {"message": message})


def _default_tokenizer(validated: dict[str, Any]) -> BytesTokenizer | ModelTokenizer:
    from_config = isinstance(validated.get("model"), ConfigModel)
    return BytesTokenizer() if from_config else ModelTokenizer()


class JobSpec(Part, title="Job"):
    """A training job: model, data and recipe, and everything else with its default.

    Build one with `parse_spec`, which accepts every spelling and reports every problem at once.
    """

    spec_version: Literal[1] = Field(default=1, description="Version of this format.")
    name: Annotated[str, Field(max_length=200)] | None = Field(
        default=None, description="A name for people."
    )
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict,
        description="Labels to filter jobs by.",
        json_schema_extra={"additionalProperties": False},
    )
    notes: Annotated[str, Field(max_length=4096)] = Field(
        default="", description="Notes for people."
    )
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="Higher runs first; jobs of equal priority run by age."
    )
    model: ModelReference = Field(description="The model to train.")
    tokenizer: Tokenizer = Field(
        default_factory=_default_tokenizer,
        description=(
            "The tokenizer. Default: the model's own, or `bytes` for a model from a config. The "
            'strings "model" and "bytes" are shorthands.'
        ),
    )
    data: DataSource = Field(description="The data to train on.")
    task: Literal["causal_lm", "masked_lm", "sequence_classification"] = Field(
        default="causal_lm",
        description="What the model learns to predict. causal_lm needs a model that looks back "
        "alone: of BERT and its like one with `is_decoder` in its configuration. masked_lm needs "
        "one that looks both ways: one with `is_decoder` is refused, unless it has an encoder.",
    )
    recipe: Recipe = Field(
        description="The precision recipe; {} is Transformer Engine's delayed scaling."
    )
    conversion: Conversion = Field(
        default_factory=Conversion, description="Which layers are converted."
    )
    adapter: LoraAdapter | None = Field(
        default=None,
        description="Train adapters beside the frozen model; null: train the model itself.",
    )
    training: Training = Field(default_factory=Training, description="How the model is trained.")
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="Evaluation on held-out data."
    )
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint, description="When checkpoints are written and kept."
    )
    telemetry: Telemetry = Field(
        default_factory=Telemetry, description="How often training reports, and where to."
    )
    resources: Resources = Field(default_factory=Resources, description="What the job runs on.")
    limits: Limits = Field(default_factory=Limits, description="Time limits and restarts.")
    secrets: Annotated[dict[SecretVariable, SecretName], Field(max_length=16)] = Field(
        default_factory=dict,
        description=(
            "Variables of the trainer's environment, each with the name of a secret that the "
            'operator holds: `{"HF_TOKEN": "hub-token"}`. Never a value.'
        ),
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is UNCHECKED or not isinstance(value, dict):
            return value
        canonical = Canonical(value)
        _refuse(canonical.problems)
        return canonical.document

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        if info.context is not UNCHECKED:
            _refuse(broken_rules(self))
        return self

    def resolved(self) -> dict[str, Any]:
        """The spec as JSON values, every default filled in. `parse_spec` of them is this spec."""
        return self.model_dump(mode="json")
