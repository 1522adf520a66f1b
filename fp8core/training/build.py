"""Tokenizer, data and model of a spec, in the order in which they need one another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fp8core.data import TrainingData, load_tokenizer, open_corpus, open_dataset
from fp8core.data.tokenizers import Tokenizer
from fp8core.models import LoadedModel, load, locate
from fp8core.spec import JobSpec, ModelTokenizer

__all__ = ["Built", "Places", "build_data_and_model"]


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
) -> Built:
    """Opens and loads everything. ``saved_tokenizer``: that of the run that is gone on with.

    Raises ``DataInvalid``, ``ModelUnavailable`` or ``SpecRefused``.
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


def _reload(spec: JobSpec, folder: Path) -> Tokenizer:
    """The tokenizer that this run trained when it began: training it again would only cost time."""
    like_a_models = spec.model_copy(update={"tokenizer": ModelTokenizer()})
    return load_tokenizer(like_a_models, model_folder=folder)
