"""Tokenizer, data and model of a spec, in the order in which they need one another."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8core.data import TrainingData, load_tokenizer, open_corpus, open_dataset
from fp8core.data.tokenizers import Tokenizer
from fp8core.durable import PARTIAL_PREFIX, told_when_full
from fp8core.models import LoadedModel, load, locate
from fp8core.spec import JobSpec, ModelTokenizer
from fp8core.training.ranks.world import World
from fp8core.training.workdir import Workdir

__all__ = ["Built", "Places", "build_data_and_model", "build_on_ranks"]


@dataclass(frozen=True)
class Places:
    """Where the paths of a spec are looked up.

    ``base``: the folder that relative paths start from when there are no ``roots``.
    ``job_folder``: the checkpoint of ``{"source": "job"}``, ``upload_folder``: the files of
    ``{"source": "upload"}``; the caller has put both there, so they need not lie below the roots.
    """

    roots: tuple[Path, ...] = ()
    base: Path | None = None
    job_folder: Path | None = None
    upload_folder: Path | None = None


@dataclass(frozen=True)
class Built:
    """What a run trains, and on what."""

    tokenizer: Tokenizer
    data: TrainingData
    loaded: LoadedModel


def build_data_and_model(
    spec: JobSpec,
    places: Places,
    *,
    device: torch.device,
    dtype: torch.dtype,
    saved_tokenizer: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Built:
    """Opens and loads everything. ``saved_tokenizer``: that of the run that is gone on with.

    ``rank`` of ``ranks``: whose batches the data is to give. Raises ``DataInvalid``,
    ``ModelUnavailable`` or ``SpecRefused``.
    """
    source = locate(
        spec,
        roots=places.roots,
        root_for_relative=places.base,
        job_folder=places.job_folder,
    )
    corpus = open_corpus(
        spec, roots=places.roots, base_folder=places.base, upload_folder=places.upload_folder
    )
    if saved_tokenizer is not None and spec.tokenizer.source == "train":
        tokenizer = _reload(spec, saved_tokenizer)
    else:
        tokenizer = load_tokenizer(
            spec,
            model_folder=source.folder,
            texts=corpus.sample_texts(),
            roots=places.roots,
            base_folder=places.base,
        )
    data = open_dataset(
        spec,
        tokenizer,
        roots=places.roots,
        base_folder=places.base,
        upload_folder=places.upload_folder,
        corpus=corpus,
        rank=rank,
        world=ranks,
    )
    loaded = load(
        spec,
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        roots=places.roots,
        root_for_relative=places.base,
        job_folder=places.job_folder,
        class_labels=data.class_labels,
        source=source,
    )
    return Built(tokenizer, data, loaded)


def build_on_ranks(
    spec: JobSpec,
    places: Places,
    world: World,
    workdir: Workdir,
    *,
    device: torch.device,
    dtype: torch.dtype,
    saved_tokenizer: Path | None = None,
) -> Built:
    """``build_data_and_model`` on every rank of ``world``, and tokenizer and config in ``workdir``.

    Where a tokenizer is to be trained rank 0 does so, and the others load what it has saved.
    """
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "rank": world.rank,
        "ranks": world.size,
    }
    trained_here = spec.tokenizer.source == "train" and saved_tokenizer is None
    built: list[Built] = []

    def build() -> None:
        built.append(build_data_and_model(spec, places, saved_tokenizer=saved_tokenizer, **options))
        _keep_tokenizer_and_config(workdir, built[0])

    if world.several and not trained_here and not world.main:
        built.append(build_data_and_model(spec, places, saved_tokenizer=saved_tokenizer, **options))
    world.from_main(build)
    if not built:
        built.append(
            build_data_and_model(spec, places, saved_tokenizer=workdir.tokenizer, **options)
        )
    return built[0]


def _keep_tokenizer_and_config(workdir: Workdir, built: Built) -> None:
    """As they are saved with every checkpoint."""
    target = workdir.tokenizer
    partial = target.with_name(f"{PARTIAL_PREFIX}tokenizer")
    with told_when_full(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        built.tokenizer.save(partial)
        built.loaded.config.save_pretrained(partial)
        # A run that made no checkpoint may have left that of another spec.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)


def _reload(spec: JobSpec, folder: Path) -> Tokenizer:
    """The tokenizer that this run trained when it began: training it again would only cost time."""
    like_a_models = spec.model_copy(update={"tokenizer": ModelTokenizer()})
    return load_tokenizer(like_a_models, model_folder=folder)
