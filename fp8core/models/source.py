"""Where a job's model lies: its folder and its configuration, read and checked before any weight.

``locate`` comes first in a run: the tokenizer may lie in the same folder, and the configuration
may need the tokenizer's size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.models.hub import fetch
from fp8core.paths import is_below, resolve_path, resolve_roots
from fp8core.spec import ConfigModel, HuggingFaceModel, JobSpec, PathModel

__all__ = ["ModelSource", "locate", "read_json"]

_LARGEST_JSON = 256 * 2**20

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class ModelSource:
    """``folder`` holds the checkpoint (None: random weights); ``config`` is its config.json.

    Every file of the folder that is read must lie below ``roots`` after symbolic links; without
    any, wherever its links lead. ``label`` names the model in messages.
    """

    folder: Path | None
    config: dict[str, Any]
    label: str
    roots: tuple[Path, ...] = field(default=())

    @property
    def pointer(self) -> str:
        return "/model/config" if self.folder is None else "/model"

    def file(self, name: str) -> Path:
        """An existing file of the folder, wherever its links lead.

        Raises ``ModelUnavailable`` where there is none, or where it lies outside the roots.
        """
        assert self.folder is not None
        path = self.folder / name
        if not path.is_file():
            raise ModelUnavailable(f"{self.label} has no file {name}", pointer=self.pointer)
        real = Path(os.path.realpath(path))
        if self.roots and not is_below(real, self.roots):
            raise ModelUnavailable(
                f"{name} of {self.label} is a link to a file outside the allowed roots",
                pointer=self.pointer,
            )
        return real


def locate(
    spec: JobSpec,
    *,
    roots: Sequence[StrPath] = (),
    root_for_relative: StrPath | None = None,
    job_folder: StrPath | None = None,
    weights: bool = True,
) -> ModelSource:
    """Find the model of ``spec`` and read its configuration.

    ``job_folder`` is where the caller put the checkpoint of ``{"source": "job"}``; it is trusted
    and need not lie below ``roots``. With ``weights=False`` a hub model's configuration and
    tokenizer are fetched, its weights not.

    Raises ``SpecRefused`` for a path outside the roots or a configuration that asks for code of
    its own, ``ModelUnavailable`` for one that is not there or not readable.
    """
    model = spec.model
    if isinstance(model, ConfigModel):
        source = ModelSource(None, dict(model.config), "the configuration")
    elif isinstance(model, HuggingFaceModel):
        folder = fetch(model.id, model.revision, weights=weights)
        source = _with_config(folder, f"model {model.id!r}", ())
    elif isinstance(model, PathModel):
        folder = resolve_path(
            model.path, roots, root_for_relative, pointer="/model/path", missing=ModelUnavailable
        )
        if not folder.is_dir():
            raise ModelUnavailable(
                f"{model.path!r} is a file; a folder with config.json and safetensors is needed",
                pointer="/model/path",
            )
        source = _with_config(folder, f"model {model.path!r}", resolve_roots(roots))
    else:
        if job_folder is None:
            raise ModelUnavailable(
                f"the checkpoint of job {model.job} was not given to this process",
                pointer="/model/job",
            )
        source = _with_config(Path(job_folder), f"the model of job {model.job}", ())
    _refuse_foreign_code(source)
    return source


def read_json(path: Path, label: str, pointer: str = "/model") -> dict[str, Any]:
    """The JSON object in ``path``; ``ModelUnavailable`` for anything else."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ModelUnavailable(f"{path.name} of {label} is too large", pointer=pointer)
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelUnavailable(
            f"{path.name} of {label} cannot be read: {error.strerror}", pointer=pointer
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable(
            f"{path.name} of {label} is not JSON: {error}", pointer=pointer
        ) from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path.name} of {label} is not a JSON object", pointer=pointer)
    return content


def _with_config(folder: Path, label: str, roots: tuple[Path, ...]) -> ModelSource:
    bare = ModelSource(folder, {}, label, roots)
    if not (folder / "config.json").is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = "; it is an adapter, and the model that it adapts is needed"
        raise ModelUnavailable(f"{label} has no config.json{hint}", pointer="/model")
    return ModelSource(folder, read_json(bare.file("config.json"), label), label, roots)


def _refuse_foreign_code(source: ModelSource) -> None:
    config = source.config
    if "auto_map" in config or any(
        isinstance(part, dict) and "auto_map" in part for part in config.values()
    ):
        raise SpecRefused(
            f"{source.label} brings Python code of its own (auto_map in its configuration); "
            "only architectures that transformers has are loaded",
            pointer=source.pointer,
        )
    if config.get("quantization_config"):
        raise SpecRefused(
            f"{source.label} is already quantized (quantization_config); "
            "training needs its original weights",
            pointer=source.pointer,
        )
    if not isinstance(config.get("model_type"), str):
        raise SpecRefused(
            f"{source.label} does not say its model_type", pointer=f"{source.pointer}"
        )
