"""What every part of the spec shares: the base model and the bounded, strict field types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**32 - 1
# A year in seconds: time limits beyond it are none.
LONGEST_LIMIT = 366 * 86_400
HUB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"

_TITLES = {
    "id": "Id",
    "lr": "Learning rate",
    "mlflow": "MLflow",
    "wandb": "Weights & Biases",
    "tensorboard": "TensorBoard",
    "tracking_uri": "Tracking URI",
    "idle_gpu_timeout_seconds": "Idle GPU timeout seconds",
    "eps": "Epsilon",
    "gpus": "GPUs",
    "fp8_format": "FP8 format",
    "fp8_every_steps": "FP8 health every steps",
    "rms_norm": "RMSNorm",
    "small_gemm": "Small GEMMs",
    "layer_norm": "LayerNorm",
    "max_grad_norm": "Maximum gradient norm",
    "amax_history_len": "Amax history length",
    "amax_compute_algo": "Amax algorithm",
}


def field_title(name: str, _field: FieldInfo | Any = None) -> str:
    """The label a form shows for the field `name`."""
    return _TITLES.get(name) or name.replace("_", " ").capitalize()


class Part(BaseModel):
    """Base of every part of a spec: unknown keys refused, no coercion, immutable.

    Core schemas are built at first use, which keeps `import fp8core.spec` quick.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        field_title_generator=field_title,
        use_attribute_docstrings=False,
    )


Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]
HubId = Annotated[
    str,
    Field(max_length=200, pattern=HUB_ID_PATTERN),
]
Revision = Annotated[str, Field(min_length=1, max_length=200, pattern=REVISION_PATTERN)]
ColumnName = Annotated[str, Field(min_length=1, max_length=256)]
ModulePattern = Annotated[str, Field(min_length=1, max_length=256)]


def one_message(message: str, *, tuples: bool = True) -> WrapValidator:
    """A validator for a small compound (a pair, a union of scalars).

    pydantic reports such a value item by item and branch by branch; a person wants one sentence.
    With `tuples`, lists are taken for tuples, which JSON does not have.
    """

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(tuple(value) if tuples and isinstance(value, list) else value)
        except ValidationError:
            raise PydanticCustomError("compound", "{message}", {"message": message}) from None

    return WrapValidator(validate)
