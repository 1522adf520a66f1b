"""What a job will take, from its spec alone: on the meta device, without weights or hardware."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fp8core.conversion import Decision, count_rows, decide, small_gemm_rule
from fp8core.conversion.report import ConversionRow
from fp8core.conversion.shape_rules import shape_rules
from fp8core.conversion.small_gemm import drops_out, keep_small_gemms
from fp8core.errors import SpecRefused
from fp8core.models.adapter_targets import adapter_targets, trained_heads
from fp8core.models.architecture import (
    VOCABULARY_MULTIPLE,
    TokenizerFacts,
    architecture,
    attention_implementation,
    cannot_be_built,
)
from fp8core.models.flops import StepFlops, step_flops
from fp8core.models.measured_speed import measured_speeds
from fp8core.models.memory import estimate_memory, linear_widths
from fp8core.models.planned_fusion import fusion_refusal, planned_fusion
from fp8core.models.planned_graphs import planned_graphs
from fp8core.models.source import ModelSource, locate
from fp8core.spec import BytesTokenizer, JobSpec, TrainTokenizer
from fp8core.spec.recipe import high_precision_gemms

__all__ = ["Plan", "plan"]

StrPath = str | os.PathLike[str]

# The byte tokenizer's 256 bytes and special tokens, rounded up to a multiple of 16.
_BYTES_VOCABULARY = 272
# Adapters are fp32 whatever the weights beside them are.
_ADAPTER_BYTES = 4


@dataclass(frozen=True)
class Plan:
    """Sizes of one job. Memory is in bytes on one GPU, FLOPs are of all GPUs together."""

    parameters: dict[str, int]
    """``total``, ``trainable``, ``embedding`` (tables, a tied output head with them)."""
    conversion: dict[str, object]
    """``layers``, ``converted``, ``kept``, ``kept_because``, and ``rows`` (name, from, reason)."""
    memory: dict[str, int]
    """Bytes by the rows of ``training.precision``, and the peak, ``total``: `MemoryEstimate`."""
    memory_moments: dict[str, int]
    """Bytes at each moment of a step that may be the peak."""
    cuda_graphs: dict[str, object]
    """Whether steps may be replayed as CUDA graphs, whose memory ``memory`` leaves out:
    `planned_graphs`."""
    small_gemm: dict[str, object]
    """What the small-GEMM rule would come to: `SmallGemms.to_json`."""
    measured: list[dict[str, object]]
    """How fast models of about this size were in FP8, over bf16: `measured_speeds`."""
    fusion: dict[str, object]
    """How many blocks would be fused, and why not the others: `PlannedFusion.to_json`."""
    checkpoint_bytes: int
    """The tensors of one checkpoint: on disk, and in the host's memory while it is written."""
    flops: StepFlops
    tokens_per_step: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    spec: JobSpec,
    *,
    roots: Sequence[StrPath] = (),
    root_for_relative: StrPath | None = None,
    job_folder: StrPath | None = None,
    tokenizer: TokenizerFacts | None = None,
    card: str | None = None,
) -> Plan:
    """The sizes of the job ``spec``.

    Only the model's configuration is read. ``tokenizer`` is needed for a configuration without a
    ``vocab_size``, unless the spec's tokenizer is ``bytes`` or ``train``, whose sizes are known.
    ``card``: the name of the GPU that it would run on, by which figures measured there are found.

    Raises what ``locate`` and ``architecture`` raise, and ``SpecRefused`` for a conversion pattern
    that matches nothing.
    """
    source = locate(
        spec,
        roots=roots,
        root_for_relative=root_for_relative,
        job_folder=job_folder,
        weights=False,
    )
    if tokenizer is None:
        tokenizer = _known_tokenizer(spec, source)
    config, model_class = architecture(spec, source, tokenizer=tokenizer)
    model = _on_meta(source, model_class, config, spec)
    decisions = decide(model, shape_rules(spec.recipe), spec.conversion)
    adapted, heads = [], []
    if spec.adapter is not None:
        adapted = adapter_targets(model, spec.adapter)
        heads = [model.get_submodule(name) for name in trained_heads(model)]
    small_gemms = keep_small_gemms(
        model,
        decisions,
        small_gemm_rule(spec, None if spec.resources.device == "cpu" else card),
        fused=fusion_refusal(spec) is None,
    )
    training = spec.training
    tokens = training.batch_size * training.sequence_length
    flops = step_flops(
        model,
        [d.layer.module for d in decisions if d.reason is None and d.norm is None],
        config,
        micro_batches=training.gradient_accumulation * spec.resources.ranks,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        override=high_precision_gemms(spec.recipe),
    )
    fusion = planned_fusion(
        model,
        decisions,
        spec,
        frozenset(layer.name for layer in adapted),
        small=bool(small_gemms.kept),
    )
    parameters = _parameters(model)
    if spec.adapter is not None:
        trained = sum(spec.adapter.rank * sum(linear_widths(layer.module)) for layer in adapted)
        trained += sum(parameter.numel() for head in heads for parameter in head.parameters())
        parameters |= {"total": parameters["total"] + trained, "trainable": trained}
    drops = drops_out(model)
    # Last: the model is of no use after it.
    estimate = estimate_memory(
        model,
        decisions,
        spec,
        tokens=tokens,
        adapted=[layer.module for layer in adapted],
        heads=heads,
        fusion=fusion,
    )
    memory = estimate.rows
    graphs = planned_graphs(spec, fusion, memory["total"], drops_out=drops)
    measured = measured_speeds(
        spec,
        parameters["total"],
        card,
        fused=bool(fusion.blocks),
        not_graphed=graphs.refusal,
    )
    saved = memory["weights"] if spec.adapter is None else trained * _ADAPTER_BYTES
    return Plan(
        parameters=parameters,
        conversion=_conversion(decisions),
        memory=memory,
        memory_moments=estimate.moments,
        cuda_graphs=graphs.to_json(),
        small_gemm=small_gemms.to_json(),
        measured=measured,
        fusion=fusion.to_json(),
        checkpoint_bytes=saved + memory["master_weights"] + memory["optimizer_states"],
        flops=flops,
        tokens_per_step=tokens * training.gradient_accumulation * spec.resources.ranks,
    )


@dataclass(frozen=True)
class _KnownSize:
    vocab_size: int
    eos_id: int | None = None
    pad_id: int | None = None


def _known_tokenizer(spec: JobSpec, source: ModelSource) -> TokenizerFacts | None:
    if isinstance(spec.tokenizer, BytesTokenizer):
        return _KnownSize(_BYTES_VOCABULARY)
    if isinstance(spec.tokenizer, TrainTokenizer):
        return _KnownSize(spec.tokenizer.vocab_size)
    if source.folder is None and source.config.get("vocab_size") is None:
        raise SpecRefused(
            "without vocab_size the model takes its tokenizer's, which is not at hand here; "
            f"give it (a multiple of {VOCABULARY_MULTIPLE})",
            pointer="/model/config/vocab_size",
        )
    return None


def _on_meta(source: ModelSource, model_class: type[Any], config: Any, spec: JobSpec) -> nn.Module:
    dtype = torch.bfloat16 if spec.training.precision.weights == "bf16" else torch.float32
    try:
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(
                config,
                dtype=dtype,
                attn_implementation=attention_implementation(model_class),
            )
    # Each architecture fails in its own way on values that its configuration class let pass.
    except Exception as error:
        raise cannot_be_built(source, "cannot be built", error) from error
    return model


def _parameters(model: nn.Module) -> dict[str, int]:
    parameters = list(model.parameters())
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        "total": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "embedding": sum(weight.numel() for weight in tables.values()),
    }


def _conversion(decisions: list[Decision]) -> dict[str, object]:
    rows = [
        ConversionRow(d.layer.name, type(d.layer.module).__name__, None, None, d.reason)
        for d in decisions
    ]
    listed = [{"name": row.name, "from": row.from_, "reason": row.reason} for row in rows]
    return {**count_rows(rows), "rows": listed}
