"""``convert``: what becomes of every Linear and norm of the model."""

from __future__ import annotations

import json
from pathlib import Path

from fp8core import engines
from fp8core.commands.quiet import quieten_libraries
from fp8core.commands.spec_file import SpecFile
from fp8core.conversion import convert, small_gemm_rule
from fp8core.data import load_tokenizer, open_corpus
from fp8core.data.batch import round_up
from fp8core.models import load, locate
from fp8core.spec import ExitCode
from fp8core.training.device import card_of, choose_device
from fp8core.training.precision import dtype_of

__all__ = ["run_convert"]


def run_convert(
    spec_file: SpecFile,
    job_folder: Path | None = None,
    upload_folder: Path | None = None,
    *,
    device: str = "auto",
) -> int:
    """Loads and converts the model as training would, and prints the report as JSON.

    The data is opened only where the model depends on it: for a tokenizer learned from it, or for
    classes that the spec does not list.
    """
    quieten_libraries()
    spec, roots, base = spec_file.spec, spec_file.roots, spec_file.base
    engine = engines.create(spec.recipe, choose_device(spec, device))
    source = locate(spec, roots=roots, root_for_relative=base, job_folder=job_folder)
    labels = spec.data.labels
    corpus = None
    if spec.tokenizer.source == "train" or (spec.data.format == "labelled" and labels is None):
        corpus = open_corpus(spec, roots=roots, base_folder=base, upload_folder=upload_folder)
    tokenizer = load_tokenizer(
        spec,
        model_folder=source.folder,
        texts=None if corpus is None else corpus.sample_texts(),
        roots=roots,
        base_folder=base,
    )
    loaded = load(
        spec,
        device=engine.device,
        dtype=dtype_of(spec.training.precision.weights),
        tokenizer=tokenizer,
        roots=roots,
        root_for_relative=base,
        job_folder=job_folder,
        class_labels=labels if corpus is None else corpus.class_labels,
        source=source,
    )
    rule = small_gemm_rule(spec, card_of(engine.device))
    length = round_up(spec.training.sequence_length, engine.token_multiple)
    report = convert(loaded.model, engine, spec.conversion, small_gemms=rule, length=length)
    print(json.dumps(report.to_json(), indent=2))
    return int(ExitCode.OK)
