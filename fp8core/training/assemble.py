"""From a loaded model to a learner: converted, adapted, compiled, with its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from fp8core.conversion import ConversionReport, convert, small_gemm_rule
from fp8core.conversion.report import ConversionRow
from fp8core.data.attention import BY_DOCUMENTS
from fp8core.data.batch import round_up
from fp8core.durable import write_json
from fp8core.engines.protocol import Engine
from fp8core.errors import TrainingError
from fp8core.fusion.adapters import PlannedAdapters
from fp8core.fusion.cross_entropy import fused_cross_entropy
from fp8core.fusion.documents import attend_by_documents
from fp8core.models import LoadedModel
from fp8core.models.adapter_targets import adapter_targets
from fp8core.spec.job import JobSpec
from fp8core.telemetry import TelemetryWriter
from fp8core.training import random_state
from fp8core.training.activation_checkpointing import enable_gradient_checkpointing
from fp8core.training.device import card_of
from fp8core.training.frozen_base import store_base
from fp8core.training.learner import Learner
from fp8core.training.optimizer import AdamW, decays
from fp8core.training.precision import dtype_of, set_gradient_dtype
from fp8core.training.ranks.world import SOLO, World
from fp8core.training.tasks import Task, create_task
from fp8core.training.workdir import Workdir

if TYPE_CHECKING:  # peft takes seconds to import, and most runs have no use for it
    from fp8core.training.adapter import Adapter

__all__ = ["Assembled", "announce_conversion", "assemble"]


@dataclass(frozen=True)
class Assembled:
    """A learner, what became of its layers, and its adapters where the spec wants some."""

    learner: Learner
    conversion: ConversionReport
    adapter: Adapter | None


def assemble(
    spec: JobSpec,
    engine: Engine,
    loaded: LoadedModel,
    *,
    class_count: int = 0,
    world: World = SOLO,
    small_gemms: Mapping[str, str] | None = None,
) -> Assembled:
    """Makes the loaded model ready for its first step. Raises ``SpecRefused``.

    Called alike on all ranks of ``world``; afterwards each draws random numbers of its own.
    ``small_gemms``: the layers that the job kept in bf16 for their size when it began, each with
    why; None: by what was measured on this GPU.
    """
    targets, planned = [], None
    if spec.adapter is not None:
        targets = adapter_targets(loaded.model, spec.adapter)
        planned = PlannedAdapters(frozenset(layer.name for layer in targets), spec.adapter)
    conversion = convert(
        loaded.model,
        engine,
        spec.conversion,
        adapters=planned,
        small_gemms=small_gemm_rule(spec, card_of(engine.device))
        if small_gemms is None
        else small_gemms,
        length=round_up(spec.training.sequence_length, engine.token_multiple),
    )
    if world.several:
        _raise_unless_alike(conversion, world)
    model = conversion.model
    adapter = None
    if spec.adapter is not None:
        from fp8core.training.adapter import attach

        adapter = attach(spec, model, targets)
        if spec.adapter.base_weights == "fp8":
            store_base(conversion, engine)
    set_gradient_dtype(model, dtype_of(spec.training.precision.gradients))
    if spec.training.gradient_checkpointing:
        enable_gradient_checkpointing(model, engine, spec.training.recomputed_blocks)
    if world.several:
        engine.share_amaxes(world)
    engine.prepare(model)
    task = create_task(spec.task, class_count=class_count)
    if spec.conversion.fuse == "auto":
        _fuse_loss(task, conversion, engine)
    if spec.task == "causal_lm" and engine.device.type == "cuda":
        _mask_less_attention(conversion, engine)
    learner = Learner(spec.training, model, engine, _optimizer(spec, model), task, world)
    random_state.part_from_rank_0(spec.training.seed, world.rank)
    return Assembled(learner, conversion, adapter)


def _raise_unless_alike(conversion: ConversionReport, world: World) -> None:
    """Raises ``TrainingError`` on every rank where a layer or block is not the same on all of them.

    They would exchange unlike numbers of amaxes, and wait for each other. Reasons are told and not
    compared: some name numbers that were measured.
    """
    keys = ("name", "to", "group", "reason")
    found = world.gather([[row[key] for key in keys] for row in conversion.to_json()])
    for rank, rows in enumerate(found):
        for own, other in zip_longest(found[0], rows, fillvalue=("", None, None, None)):
            if own[:3] != other[:3]:
                raise TrainingError(
                    f"the ranks have not converted and fused alike: {own[0] or other[0]} became "
                    f"{_became(*own)} on rank 0 and {_became(*other)} on rank {rank}"
                )


def _became(name: str, to: str | None, group: str | None, reason: str | None) -> str:
    """In words; a row without a name is of another rank alone."""
    if not name:
        return "nothing"
    part = "" if group is None else f" of {group}"
    return f"{to or 'what it was'}{part}{f' ({reason})' if reason else ''}"


def announce_conversion(
    conversion: ConversionReport,
    workdir: Workdir,
    telemetry: TelemetryWriter,
    step: int,
    world: World = SOLO,
) -> None:
    """Writes the report; one that changed after step 0 goes out under a name of its own too.

    Rank 0 does.
    """
    if not world.main:
        return
    write_json(workdir.conversion, conversion.to_json())
    path = workdir.conversion
    if step:
        path = path.with_name(f"conversion-{step:08d}.json")
        write_json(path, conversion.to_json())
    telemetry.artifact("conversion", workdir.relative(path), step)


def _mask_less_attention(conversion: ConversionReport, engine: Engine) -> None:
    """Where attention is not fused, packed documents need no masks all the same."""
    model, fusion = conversion.model, conversion.fusion
    if fusion is not None and fusion.whole:
        return
    if any(module._compiled_call_impl is not None for module in model.modules()):
        # Compiled code takes bounds too (on a CPU); with the kernels of a GPU it was never run.
        reason: str | None = "the model's blocks are compiled with masks"
    else:
        fused = [] if fusion is None else fusion.attentions
        reason = attend_by_documents(model, engine.evaluation_context, engine.device, fused)
    to = None if reason else BY_DOCUMENTS
    conversion.others.append(ConversionRow("attention", "sdpa", to, None, reason))


def _fuse_loss(task: Task, conversion: ConversionReport, engine: Engine) -> None:
    """Whatever becomes of the blocks. In bf16: other formats are there to compare with."""
    if engine.device.type != "cuda" or engine.compute_dtype != torch.bfloat16:
        return
    found = fused_cross_entropy(engine.device)
    reason = found if isinstance(found, str) else None
    if not isinstance(found, str):
        task.cross_entropy = found
    to = None if reason else "FusedCrossEntropy"
    conversion.others.append(ConversionRow("loss", "CrossEntropy", to, None, reason))


def _optimizer(spec: JobSpec, model: torch.nn.Module) -> AdamW:
    wanted, precision = spec.training.optimizer, spec.training.precision
    return AdamW(
        model.named_parameters(),
        decayed=decays(model),
        lr=wanted.lr,
        betas=wanted.betas,
        eps=wanted.eps,
        weight_decay=wanted.weight_decay,
        state_dtype=dtype_of(precision.optimizer_states),
        master_weights=precision.master_weights == "fp32",
        seed=spec.training.seed,
    )
