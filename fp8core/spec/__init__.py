"""The job specification: the language that trainer, worker, API and client all speak.

Imports no torch and nothing else of this project. Names load at first use:

    from fp8core.spec import SpecInvalid, parse_spec
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8core.spec.job import Checkpoint as Checkpoint
    from fp8core.spec.job import Conversion as Conversion
    from fp8core.spec.job import Evaluation as Evaluation
    from fp8core.spec.job import JobSpec as JobSpec
    from fp8core.spec.job import Limits as Limits
    from fp8core.spec.job import LoraAdapter as LoraAdapter
    from fp8core.spec.job import MlflowSink as MlflowSink
    from fp8core.spec.job import Resources as Resources
    from fp8core.spec.job import Telemetry as Telemetry
    from fp8core.spec.job import WandbSink as WandbSink
    from fp8core.spec.outcomes import ExitCode as ExitCode
    from fp8core.spec.outcomes import Outcome as Outcome
    from fp8core.spec.outcomes import Reason as Reason
    from fp8core.spec.parsing import parse_spec as parse_spec
    from fp8core.spec.problems import Problem as Problem
    from fp8core.spec.problems import SpecInvalid as SpecInvalid
    from fp8core.spec.recipe import TEMXFP8 as TEMXFP8
    from fp8core.spec.recipe import TENVFP4 as TENVFP4
    from fp8core.spec.recipe import AmpRecipe as AmpRecipe
    from fp8core.spec.recipe import EmulatedCurrent as EmulatedCurrent
    from fp8core.spec.recipe import EmulatedDelayed as EmulatedDelayed
    from fp8core.spec.recipe import Recipe as Recipe
    from fp8core.spec.recipe import TEBlock as TEBlock
    from fp8core.spec.recipe import TECurrent as TECurrent
    from fp8core.spec.recipe import TEDelayed as TEDelayed
    from fp8core.spec.recipe import TorchaoRecipe as TorchaoRecipe
    from fp8core.spec.schema import json_schema as json_schema
    from fp8core.spec.sources import BuiltinData as BuiltinData
    from fp8core.spec.sources import BytesTokenizer as BytesTokenizer
    from fp8core.spec.sources import Columns as Columns
    from fp8core.spec.sources import ConfigModel as ConfigModel
    from fp8core.spec.sources import DataSource as DataSource
    from fp8core.spec.sources import HuggingFaceData as HuggingFaceData
    from fp8core.spec.sources import HuggingFaceModel as HuggingFaceModel
    from fp8core.spec.sources import HuggingFaceTokenizer as HuggingFaceTokenizer
    from fp8core.spec.sources import JobModel as JobModel
    from fp8core.spec.sources import JsonlData as JsonlData
    from fp8core.spec.sources import ModelReference as ModelReference
    from fp8core.spec.sources import ModelTokenizer as ModelTokenizer
    from fp8core.spec.sources import ParquetData as ParquetData
    from fp8core.spec.sources import PathModel as PathModel
    from fp8core.spec.sources import PathTokenizer as PathTokenizer
    from fp8core.spec.sources import TextData as TextData
    from fp8core.spec.sources import Tokenizer as Tokenizer
    from fp8core.spec.sources import TrainTokenizer as TrainTokenizer
    from fp8core.spec.sources import UploadData as UploadData
    from fp8core.spec.training import AdamW as AdamW
    from fp8core.spec.training import ConstantSchedule as ConstantSchedule
    from fp8core.spec.training import CosineSchedule as CosineSchedule
    from fp8core.spec.training import EarlyStopping as EarlyStopping
    from fp8core.spec.training import LinearSchedule as LinearSchedule
    from fp8core.spec.training import OnDivergence as OnDivergence
    from fp8core.spec.training import Parity as Parity
    from fp8core.spec.training import Precision as Precision
    from fp8core.spec.training import Schedule as Schedule
    from fp8core.spec.training import Training as Training
    from fp8core.spec.training import WarmupStableDecaySchedule as WarmupStableDecaySchedule

_NAMES = {
    "outcomes": "ExitCode Outcome Reason",
    "problems": "Problem SpecInvalid",
    "parsing": "parse_spec",
    "schema": "json_schema",
    "job": (
        "Checkpoint Conversion Evaluation JobSpec Limits LoraAdapter MlflowSink Resources "
        "Telemetry WandbSink"
    ),
    "recipe": (
        "AmpRecipe EmulatedCurrent EmulatedDelayed Recipe TEBlock TECurrent TEDelayed TEMXFP8 "
        "TENVFP4 TorchaoRecipe"
    ),
    "sources": (
        "BuiltinData BytesTokenizer Columns ConfigModel DataSource HuggingFaceData "
        "HuggingFaceModel HuggingFaceTokenizer JobModel JsonlData ModelReference ModelTokenizer "
        "ParquetData PathModel PathTokenizer TextData Tokenizer TrainTokenizer UploadData"
    ),
    "training": (
        "AdamW ConstantSchedule CosineSchedule EarlyStopping LinearSchedule OnDivergence Parity "
        "Precision Schedule Training WarmupStableDecaySchedule"
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
