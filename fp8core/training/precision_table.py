"""``precision.json``: the precision table of the method, measured on the running job.

The rows are those of the table by which mixed-precision training is described: GEMM compute,
communication, weights, master weights, weight gradients, optimizer states; and what attention
multiplies in. Nothing is read from the spec. Operands are seen as the model's own GEMMs and
attention take them, in one small micro-batch before the first step, whose traces are removed again;
the rest is counted tensor by tensor in that step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.conversion import ConversionReport
from fp8core.conversion.find import is_conv1d
from fp8core.data.batch import TOKEN_MULTIPLE, Batch
from fp8core.durable import write_json
from fp8core.engines.attention_watch import AttentionWatch
from fp8core.engines.gemm_watch import GEMMS, GemmWatch, format_of
from fp8core.telemetry import TelemetryWriter
from fp8core.training.forward import logits_of
from fp8core.training.learner import Learner
from fp8core.training.moments import formats_of_8_bits
from fp8core.training.workdir import Workdir

__all__ = ["PrecisionTable"]

FORMAT = 1
Together = dict[str, tuple[tuple[str, ...], ...]]
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp4_e2m1": 0.5}


class PrecisionTable:
    """Measures the first step that this process takes, and only that."""

    def __init__(
        self, learner: Learner, conversion: ConversionReport, telemetry: TelemetryWriter
    ) -> None:
        self._learner = learner
        self._conversion = conversion
        self._telemetry = telemetry
        self._gemms: list[dict[str, Any]] | None = None
        self._attention: list[dict[str, Any]] | None = None
        self._gradients: dict[str, Any] | None = None
        self._due = True

    def before_step(self, batches: Sequence[Batch]) -> None:
        """If this is the first step: sends its first tokens, repeated, through the model."""
        if not self._due or self._gemms is not None:
            return
        try:
            self._gemms = self._measure(batches[0])
        # Not even a fault of ours is worth the run that it reports on.
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._telemetry.event(
                "precision_not_measured", f"the formats of the GEMMs were not seen: {text}", {}
            )
            self._gemms = []

    def after_backward(self) -> None:
        """The gradients as the backward pass left them."""
        if self._due:
            parameters = self._learner.model.parameters()
            self._gradients = _counted(p.grad for p in parameters if p.grad is not None)

    def after_step(self, step: int, workdir: Workdir) -> None:
        """Writes the table and announces it."""
        if not self._due:
            return
        self._due = False
        learner = self._learner
        states = learner.optimizer.state_tensors()
        masters = {key: t for key, t in states.items() if key.endswith("/master")}
        table = {
            "format": FORMAT,
            "step": step,
            "engine": learner.engine.name,
            "rows": {
                "gemm_compute": {"layers": self._gemms},
                "attention_compute": {"passes": self._attention},
                "communication": _communication(learner),
                "weights": _counted(learner.model.parameters()),
                "master_weights": _counted(masters.values()),
                "weight_gradients": self._gradients,
                "optimizer_states": _counted_moments(states),
            },
            "engine_state": _counted(learner.engine.state_dict().values()),
        }
        if learner.world.main:
            write_json(workdir.precision, table)
        self._telemetry.artifact("report", workdir.relative(workdir.precision), step)

    def _measure(self, batch: Batch) -> list[dict[str, Any]]:
        learner, engine = self._learner, self._learner.engine
        layers = _linear_layers(learner.model, self._conversion)
        fused, together = _fused_modules(self._conversion, layers)
        inside = {name for groups in together.values() for group in groups for name in group}
        modules = {name: layer for name, layer in layers.items() if name not in inside} | fused
        small = _beginning(batch, _rows(layers, together, engine.token_multiple))
        state = dict(engine.state_dict())
        devices = [engine.device] if engine.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            torch.compiler.set_stance("force_eager"),
            GemmWatch(modules, small.input_ids.shape, together) as watch,
            AttentionWatch() as attention,
        ):
            there = small.to(engine.device)
            with engine.training_context():
                # Any scalar will do: the loss of a few tokens may have no target.
                value = logits_of(learner.model, there, engine).float().square().mean()
            value.backward()
            engine.after_backward()
        learner.drop_gradients()
        engine.load_state_dict(state)
        self._attention = _passes(attention)
        return _by_kind(layers, watch, self._conversion)


def _communication(learner: Learner) -> dict[str, Any]:
    """What this rank handed over for the all-reduce of its gradients in this step."""
    sent = {} if learner.reducer is None else learner.reducer.sent
    total = sum(found["bytes"] for found in sent.values())
    return {"ranks": learner.world.size, "formats": sent, "bytes": total}


def _linear_layers(model: nn.Module, conversion: ConversionReport) -> dict[str, nn.Module]:
    converted = {id(item.replacement) for item in conversion.replacements}
    return {
        name: module
        for name, module in model.named_modules()
        if not any(True for _ in module.children())
        and (
            isinstance(module, nn.Linear)
            or is_conv1d(module)
            or (id(module) in converted and hasattr(module, "out_features"))
        )
    }


def _fused_modules(
    conversion: ConversionReport, linears: Collection[str]
) -> tuple[dict[str, nn.Module], Together]:
    """The modules that compute fused layers, by name, and the layers of each of their GEMMs.

    ``linears``: the model's, where one with an adapter is the ``base_layer`` of what it became.
    """
    blocks = [] if conversion.fusion is None else conversion.fusion.blocks
    found = {name: pair for block in blocks for name, pair in block.modules.items()}
    modules = {name: module for name, (module, _) in found.items()}
    together = {
        name: tuple(
            tuple(one if one in linears else f"{one}.base_layer" for one in layers)
            for layers in gemms
        )
        for name, (_, gemms) in found.items()
    }
    return modules, together


def _rows(layers: dict[str, nn.Module], together: Together, multiple: int) -> int:
    """So many rows of 16 tokens that no layer has as many features as rows, nor as tokens.

    Nor have the layers that are one GEMM together. Their tokens are a multiple of ``multiple``.
    """
    features = {side for layer in layers.values() for side in layer.weight.shape}  # type: ignore[union-attr]
    for names in chain.from_iterable(together.values()):
        features.add(sum(layers[name].weight.shape[0] for name in names))  # type: ignore[index, misc]
    step = multiple // TOKEN_MULTIPLE
    return next(n for n in count(step, step) if not {n, n * TOKEN_MULTIPLE} & features)


def _beginning(batch: Batch, rows: int) -> Batch:
    """The first 16 tokens of the batch, ``rows`` times."""

    def part(values: Tensor) -> Tensor:
        first = values[:1, :TOKEN_MULTIPLE] if values.dim() == 2 else values[:1]
        return first.expand(rows, *first.shape[1:]).contiguous()

    mask = batch.attention_mask
    return replace(
        batch,
        input_ids=part(batch.input_ids),
        labels=part(batch.labels),
        attention_mask=None if mask is None else part(mask),
        position_ids=part(batch.position_ids),
        document_ids=part(batch.document_ids),
        document_bounds=None,
    )


def _by_kind(
    layers: dict[str, nn.Module], watch: GemmWatch, conversion: ConversionReport
) -> list[dict[str, Any]]:
    """One entry for layers of the same class that saw the same formats."""
    converted = {id(item.replacement) for item in conversion.replacements}
    fused = {} if conversion.fusion is None else conversion.fusion.classes
    kept = {row.name for row in conversion.kept}
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, seen in watch.seen.items():
        formats = tuple(
            (gemm, pair) for gemm in GEMMS for pair in sorted(seen.get(gemm, Counter()))
        )
        module = layers[name]
        own_name = name.removesuffix(".base_layer")
        kind = fused.get(own_name, type(module).__name__)
        is_converted = (own_name in fused and own_name not in kept) or id(module) in converted
        adapter = any(part.startswith("lora_") for part in name.split("."))
        groups[kind, is_converted, adapter, formats].append(name)
    return [
        {
            "kind": kind,
            "converted": is_converted,
            "adapter": adapter,
            "layers": len(names),
            "example": names[0].removesuffix(".base_layer"),
            "gemms": [_gemm(gemm, pair) for gemm, pair in formats],
        }
        for (kind, is_converted, adapter, formats), names in groups.items()
    ]


def _passes(attention: AttentionWatch) -> list[dict[str, Any]]:
    """One entry for each pass of attention and each format that it multiplied in."""
    return [
        {
            "pass": direction,
            "format": name,
            "bytes_per_element": _BYTES.get(name),
            "calls": calls,
        }
        for (direction, name), calls in sorted(attention.seen.items(), reverse=True)
    ]


def _gemm(gemm: str, pair: tuple[str, str]) -> dict[str, Any]:
    return {
        "gemm": gemm,
        "operands": {
            operand: {"format": name, "bytes_per_element": _BYTES.get(name)}
            for operand, name in zip(GEMMS[gemm], pair, strict=True)
        },
    }


def _counted_moments(states: dict[str, Tensor]) -> dict[str, Any]:
    """As ``_counted``; codes of 8 bits under the name of what they are codes of."""
    moments = {key: t for key, t in states.items() if "/exp_avg" in key}
    counted = _counted(t for t in moments.values() if t.dtype != torch.uint8)
    formats = counted["formats"] | formats_of_8_bits(moments)
    return {"formats": formats, "bytes": sum(found["bytes"] for found in formats.values())}


def _counted(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Bytes and elements by format, and all bytes together."""
    formats: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        found = formats.setdefault(format_of(tensor), {"bytes": 0, "elements": 0})
        found["bytes"] += tensor.nbytes
        found["elements"] += tensor.numel()
    return {"formats": formats, "bytes": sum(found["bytes"] for found in formats.values())}
